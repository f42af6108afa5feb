"""Memory while loading: at most the weights, the largest tensor and 100 MiB, seen from inside a process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checks.tiny_models import write_tiny_model

_MIB = 1 << 20
_ALLOWANCE_BYTES = 100 * _MIB

_PROGRAM = """
import json, sys, threading
from pathlib import Path
from engine.model import load_model
import transformers.models.llama.modeling_llama, transformers.models.qwen3.modeling_qwen3

def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

def watch():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, resident_bytes())

before = peak = resident_bytes()
stop = threading.Event()
thread = threading.Thread(target=watch)
thread.start()
model = load_model(Path(sys.argv[1]), sys.argv[2])
tensors = {p.data_ptr(): p.numel() * p.element_size() for p in model.module.parameters()}
touched = sum(float(p.sum(dtype=float)) for p in model.module.parameters())
stop.set()
thread.join()
peak = max(peak, resident_bytes())
print(json.dumps({"growth": peak - before, "weights": sum(tensors.values()), "largest": max(tensors.values())}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_loading_takes_the_weights_the_largest_tensor_and_100_mib_at_most(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    """Large enough that a second copy of the weights breaks the limit in float32."""
    model = write_tiny_model(
        tmp_path,
        family,
        dtype=torch.bfloat16,
        tie_word_embeddings=tied,
        hidden_size=1536,
        intermediate_size=3072,
        num_hidden_layers=5,
        vocab_size=8192,
    )
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(model), dtype], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(done.stdout)
    assert seen["weights"] > 1.5 * _ALLOWANCE_BYTES
    assert seen["growth"] <= seen["weights"] + seen["largest"] + _ALLOWANCE_BYTES
