"""One sequence in an engine: its states, tokens and blocks.

States, as arrows (each has a test):

    WAITING        -> PREFILLING                first chunk scheduled, blocks allocated
    WAITING_FOR_KV -> DECODING | FINISHED       hand-over confirmed
    PREFILLING     -> DECODING | HELD | FINISHED | PREEMPTED
    DECODING       -> FINISHED | PREEMPTED
    PREEMPTED      -> PREFILLING                blocks allocated again
    HELD           -> (only the release ends it: its blocks are announced to another pool)
    any of them    -> CANCELLED                 released by its owner
    any of them    -> FAILED                    an error of this sequence
    (nothing)      -> REJECTED                  it can never fit, or does not fit now and may not wait

FINISHED, CANCELLED, REJECTED and FAILED are the end and give every block back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.prefix import block_hash, root_hash
from engine.sampling_params import SamplingParams


class SequenceKind(Enum):
    """What an engine does with a sequence."""

    LOCAL = "local"
    """Computes the prompt and generates."""
    PREFILL_ONLY = "prefill_only"
    """Computes the prompt, samples the first token, and holds the blocks for another pool."""
    REMOTE_KV = "remote_kv"
    """Reserves blocks, waits until another pool's KV is in them, and generates."""


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


_S = SequenceState
_ENDS_EARLY = frozenset({_S.CANCELLED, _S.FAILED})
ARROWS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.REJECTED}) | _ENDS_EARLY,
    _S.WAITING_FOR_KV: frozenset({_S.DECODING, _S.FINISHED, _S.REJECTED}) | _ENDS_EARLY,
    _S.PREFILLING: frozenset({_S.DECODING, _S.HELD, _S.FINISHED, _S.PREEMPTED}) | _ENDS_EARLY,
    _S.DECODING: frozenset({_S.FINISHED, _S.PREEMPTED}) | _ENDS_EARLY,
    _S.HELD: _ENDS_EARLY,
    _S.PREEMPTED: frozenset({_S.PREFILLING}) | _ENDS_EARLY,
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.FAILED: frozenset(),
}
TERMINAL = frozenset(state for state, onward in ARROWS.items() if not onward)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What its owner asks of an engine."""

    seq_id: str
    """Unique in the engine, chosen before it is posted, so that its release can be posted whatever happens."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kind: SequenceKind
    output_token_ids: tuple[int, ...] = ()
    """A resume of one sample (n = 1): computed like the prompt, never sampled again."""
    tenant_salt: bytes = b""
    priority: int = 0
    """Smaller is served first."""
    hold: bool = True
    """PREFILL_ONLY: keep the blocks after the first token until the release; False: hand nothing over and finish."""
    reader_id: str = ""
    """PREFILL_ONLY: a reader that gets references of its own on all blocks with their allocation, so that it need not wait for the engine thread,
    busy with the next chunk, when a chunk can be read. Its owner owes a `drop`, posted behind the sequence's release."""

    max_recompute_tokens: int | None = None
    """When a preempted sample comes back with more tokens than this to compute, its owner is asked for their KV (see events.Readmitted); None: it is always
    computed here."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        if self.sampling.n > 1 and self.output_token_ids:
            raise ValueError("output_token_ids are those of one sample, n is above 1")
        if self.sampling.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.sampling.max_tokens}")


class Sequence:
    """A sequence's progress. Touched by the engine thread only."""

    def __init__(self, spec: SequenceSpec, *, block_size: int, model_fingerprint: str, arrival: int) -> None:
        self.spec = spec
        self.seq_id = spec.seq_id
        self.owner = f"sequence:{spec.seq_id}"
        self.state = SequenceState.WAITING_FOR_KV if spec.kind is SequenceKind.REMOTE_KV else SequenceState.WAITING
        self.token_ids: list[int] = [*spec.prompt_token_ids, *spec.output_token_ids]
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_computed_tokens = 0
        """Leading tokens whose keys and values are in the blocks."""
        self.num_cached_tokens = 0
        """Prompt tokens that its first scheduling found in the prefix cache."""
        self.num_charged_blocks = 0
        """Blocks that its allocation took from the set of allocatable ones."""
        self.num_filled_blocks = 0
        """Leading blocks marked as filled."""
        self.prefill_target = len(self.token_ids)
        """Tokens to compute before the next one is sampled; those up to here count as prompt work."""
        self.block_ids: list[int] = []
        self.order = (spec.priority, arrival)
        self.first_scheduled_ns: int | None = None
        self.announced = False
        """Another pool was told of its blocks: the table is frozen."""
        self._block_size = block_size
        self._names = [root_hash(spec.tenant_salt, model_fingerprint)]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of a resume included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the blocks yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def block_names(self, num_blocks: int) -> list[bytes]:
        """Prefix hashes of the leading `num_blocks` full blocks."""
        while len(self._names) <= num_blocks:
            first = (len(self._names) - 1) * self._block_size
            self._names.append(block_hash(self._names[-1], self.token_ids[first : first + self._block_size]))
        return self._names[1 : num_blocks + 1]

    def to(self, state: SequenceState) -> None:
        """Follows an arrow; any other move is a broken invariant, and no EngineError: nobody's answer, but the engine's end."""
        if state not in ARROWS[self.state]:
            raise AssertionError(f"sequence {self.seq_id} cannot go from {self.state.value} to {state.value}")
        self.state = state
