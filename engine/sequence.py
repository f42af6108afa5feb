"""One sequence in an engine: its states, tokens and blocks.

States, as arrows (each has a test):

    WAITING        -> PREFILLING                first chunk scheduled, blocks allocated
    WAITING        -> REJECTED                  it can never fit
    WAITING_FOR_KV -> DECODING                  hand-over confirmed
    PREFILLING     -> DECODING | HELD | FINISHED | PREEMPTED
    DECODING       -> FINISHED | PREEMPTED
    PREEMPTED      -> PREFILLING                blocks allocated again
    PREEMPTED      -> WAITING_FOR_KV            blocks allocated again, and too much to compute here
    HELD           -> (only the release ends it: its blocks are announced to another pool)
    any of them    -> CANCELLED                 released by its owner
    any of them    -> FAILED                    an error of this sequence; a waiting or held one computes nothing that could fail

FINISHED, CANCELLED, REJECTED and FAILED are the end and give every block back. A reservation that is refused has never been a sequence of the engine.

Samples: until the prompt is computed, one Sequence stands for all n of them and has all their blocks. Then it forks into one for each; each follows the arrows
by itself from there on. A PREFILL_ONLY sequence never forks.
"""

from __future__ import annotations

from copy import copy
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
    _S.WAITING: frozenset({_S.PREFILLING, _S.REJECTED, _S.CANCELLED}),
    _S.WAITING_FOR_KV: frozenset({_S.DECODING}) | _ENDS_EARLY,
    _S.PREFILLING: frozenset({_S.DECODING, _S.HELD, _S.FINISHED, _S.PREEMPTED}) | _ENDS_EARLY,
    _S.DECODING: frozenset({_S.FINISHED, _S.PREEMPTED}) | _ENDS_EARLY,
    _S.HELD: frozenset({_S.CANCELLED}),
    _S.PREEMPTED: frozenset({_S.PREFILLING, _S.WAITING_FOR_KV}) | _ENDS_EARLY,
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
        if self.sampling.n < 1:
            raise ValueError(f"n must be at least 1, got {self.sampling.n}")
        if self.sampling.n > 1 and self.output_token_ids:
            raise ValueError("output_token_ids are those of one sample, n is above 1")
        if self.sampling.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.sampling.max_tokens}")


class Sequence:
    """A sequence's progress, or that of one of its samples. Touched by the engine thread only."""

    def __init__(self, spec: SequenceSpec, *, block_size: int, model_fingerprint: str, arrival: int) -> None:
        self.spec = spec
        self.seq_id = spec.seq_id
        self.index = 0
        """Its first sample's."""
        self.samples = tuple(spec.sampling.of_sample(index) for index in range(spec.sampling.n))
        """Parameters of the samples that it stands for."""
        num_tables = 1 if spec.kind is SequenceKind.PREFILL_ONLY else len(self.samples)
        self.sample_ids = tuple(f"{spec.seq_id}[{index}]" if index else spec.seq_id for index in range(num_tables))
        """Names of the samples that have a block table and need a place, all that it stands for but those of a PREFILL_ONLY sequence, which never go on."""
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
        """The block table, of its first sample."""
        self.sibling_tables: list[list[int]] = []
        """Those of its other samples: they share the prompt's full blocks."""
        self.copy_source: int | None = None
        """A sibling's block whose content goes into its own last prompt block before its first step behind the fork."""
        self.next_prompt_logprob = self.num_prompt_tokens
        """Index of the prompt token whose log probability is to be told next; beyond the prompt when none is."""
        if spec.sampling.prompt_logprobs is not None and spec.kind is not SequenceKind.REMOTE_KV and not spec.output_token_ids:
            self.next_prompt_logprob = 1
        self.order = (spec.priority, arrival, 0)
        """Priority, arrival, sample: who is younger gives way when blocks are short."""
        self.turn: tuple[float, ...] = self.order
        """The policy's: whose prompt is computed first."""
        self.first_scheduled_ns: int | None = None
        self.announced = False
        """Another pool was told of its blocks: the table is frozen."""
        self._block_size = block_size
        self._names = [root_hash(spec.tenant_salt, model_fingerprint)]

    @property
    def sample_id(self) -> str:
        """Its name in plans, and its blocks' owner's."""
        return self.sample_ids[0]

    @property
    def num_places(self) -> int:
        """Places of max_num_seqs that it needs."""
        return len(self.sample_ids)

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

    @property
    def has_generated(self) -> bool:
        """It has tokens that its owner did not give it with its spec."""
        return self.num_output_tokens > len(self.spec.output_token_ids)

    @property
    def all_block_ids(self) -> tuple[int, ...]:
        """Every block that it has, once: the prompt's first, then those for output, then what its other samples do not share."""
        num_shared = self.num_tokens // self._block_size
        return (*self.block_ids, *(block for table in self.sibling_tables for block in table[num_shared:]))

    def hittable_names(self) -> list[bytes]:
        """Prefix hashes of the leading full blocks that may come from the prefix cache: a prompt is computed for its log probabilities."""
        if self.next_prompt_logprob < self.num_prompt_tokens:
            return self.block_names((self.next_prompt_logprob - 1) // self._block_size)
        return self.block_names(self.num_tokens // self._block_size)

    def block_names(self, num_blocks: int) -> list[bytes]:
        """Prefix hashes of the leading `num_blocks` full blocks."""
        while len(self._names) <= num_blocks:
            first = (len(self._names) - 1) * self._block_size
            self._names.append(block_hash(self._names[-1], self.token_ids[first : first + self._block_size]))
        return self._names[1 : num_blocks + 1]

    def fork(self) -> list[Sequence]:
        """The prompt is computed: one sequence for each sample, this one for the first. A partly used last block is the first one's, the others copy it."""
        num_shared = self.num_tokens // self._block_size
        source = self.block_ids[num_shared] if self.num_tokens % self._block_size else None
        others = [self._sibling(number, table, source) for number, table in enumerate(self.sibling_tables, start=1)]
        self.samples, self.sample_ids, self.sibling_tables = self.samples[:1], self.sample_ids[:1], []
        return [self, *others]

    def _sibling(self, number: int, table: list[int], copy_source: int | None) -> Sequence:
        sibling = copy(self)
        sibling.index = self.index + number
        sibling.samples, sibling.sample_ids = self.samples[number : number + 1], self.sample_ids[number : number + 1]
        sibling.block_ids, sibling.sibling_tables, sibling.copy_source = table, [], copy_source
        sibling.token_ids, sibling._names = self.token_ids.copy(), self._names.copy()
        sibling.order = (*self.order[:2], sibling.index)
        sibling.turn = (*self.turn[:-1], sibling.index)
        return sibling

    def to(self, state: SequenceState) -> None:
        """Follows an arrow; any other move is a broken invariant, and no EngineError: nobody's answer, but the engine's end."""
        if state not in ARROWS[self.state]:
            raise AssertionError(f"sequence {self.sample_id} cannot go from {self.state.value} to {state.value}")
        self.state = state
