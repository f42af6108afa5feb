"""What an engine tells about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A cheap snapshot, taken after every step."""

    num_running: int
    """Samples that compute: places of max_num_seqs."""
    num_waiting: int
    """Sequences in the queue, preempted samples among them."""
    num_in_handover: int
    """Samples that wait for KV, and prompts that are held for another pool."""
    backlog_tokens: int
    """Prompt tokens not yet computed."""
    num_blocks: int
    num_free_blocks: int
    """Blocks that an allocation could take now."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Where every block is, and what was done since the start."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    owners: Mapping[str, int]
    """Block references by owner name."""
    sequences_by_state: Mapping[str, int]
    num_readers: int
    computed_prompt_tokens: int
    generated_tokens: int
    num_steps: int
    num_late_steps: int
    """Sequences computed in a step that was launched after their release had been posted."""
    num_preemptions: int
    num_readmissions: int = 0
    """Preempted samples that got blocks again and were told to their owner (see events.Readmitted)."""

    @property
    def nothing_held(self) -> bool:
        """No block has an owner, no sequence lives, no reader reads."""
        return not self.owners and not self.sequences_by_state and self.num_readers == 0 and self.num_held_blocks == 0
