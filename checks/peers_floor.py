"""The least time that a cell can take on this machine: what must be read and computed, over the rates measured in the same run.

A step that generates a token for each of B streams with C tokens of context reads all weights and the streams' KV once,

    bytes = 2 (linear + head) + B C kv_bytes          operations = B (2 (linear + head) + 4 layers heads head_dim C)

and takes at least the longer of bytes / read rate and operations / matmul rate. A prompt of N tokens takes in the same way at least the longer of

    bytes = 2 (linear + head)                         operations = N 2 linear + 2 head + 2 layers heads head_dim N^2

(each token attends to those before it, and the head is computed for the last one). `linear` and `head` are numbers of weights, of 2 bytes each. A cell's
floor is that of all its prompts and of all its steps at full batch with half the output as further context: neither sampling, nor norms, nor a server, nor a
generator.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from checks.peers_cells import CONTEXT, PROMPT, Cell, Reading

_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the machine, all its cores together."""

    read_gb_per_s: float
    matmul_gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """Of a dense decoder in bfloat16."""

    linear_weights: int
    """Of all layers."""
    head_weights: int
    kv_bytes: int
    """Of a token."""
    attention: int
    """layers * heads * head_dim."""
    vocab_size: int

    @classmethod
    def of(cls, model: Path) -> Size:
        """Of a folder with a config.json of the Llama kind."""
        config = json.loads((model / "config.json").read_text())
        layers, hidden, heads, vocab = (int(config[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"))
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * int(config["intermediate_size"])
        return cls(layers * layer, hidden * vocab, 2 * layers * kv_heads * head_dim * _BYTES, layers * heads * head_dim, vocab)

    @property
    def weight_bytes(self) -> int:
        """That a step reads."""
        return _BYTES * (self.linear_weights + self.head_weights)

    def step_bytes(self, batch: int, context: float) -> float:
        """That a step of so many streams with so much context reads."""
        return self.weight_bytes + batch * context * self.kv_bytes

    def step_operations(self, batch: int, context: float) -> float:
        """Of such a step."""
        return batch * (2.0 * (self.linear_weights + self.head_weights) + 4.0 * self.attention * context)

    def prompt_operations(self, tokens: int) -> float:
        """Of a prompt."""
        return 2.0 * tokens * self.linear_weights + 2.0 * self.head_weights + 2.0 * self.attention * tokens * tokens


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one cell, seconds."""

    prompt_s: float
    """Of one prompt."""
    step_s: float
    """Of one step at full batch."""
    step_bound: str
    """memory or compute."""
    cell_s: float
    figure_s: float
    """What the cell's figure is held against: the whole cell, a prompt, or a step."""

    def row(self) -> dict[str, float | str]:
        """Milliseconds, for a file."""
        return {name.replace("_s", "_ms"): round(value * 1e3, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def floor_of(cell: Cell, size: Size, limits: Limits) -> Floor:
    """By the formula above."""
    read, compute = limits.read_gb_per_s * 1e9, limits.matmul_gflop_per_s * 1e9
    context = cell.prompt_tokens + cell.output_tokens / 2
    memory_s, compute_s = size.step_bytes(cell.concurrency, context) / read, size.step_operations(cell.concurrency, context) / compute
    prompt_s = max(size.weight_bytes / read, size.prompt_operations(cell.prompt_tokens) / compute)
    step_s = max(memory_s, compute_s)
    cell_s = cell.num_requests * (prompt_s + (cell.output_tokens - 1) / cell.concurrency * step_s)
    figure_s = {PROMPT.figure: prompt_s, CONTEXT.figure: step_s}.get(cell.figure, cell_s)
    return Floor(prompt_s, step_s, "memory" if memory_s >= compute_s else "compute", cell_s, figure_s)


def measured_s(cell: Cell, reading: Reading) -> float:
    """What `Floor.figure_s` is the least of."""
    return {PROMPT.figure: reading.ttft_ms / 1e3, CONTEXT.figure: reading.batch_tpot_ms / 1e3}.get(cell.figure, reading.seconds)
