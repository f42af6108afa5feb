"""Which sequences an engine has, by the names of sequences and of samples."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import EngineError
from engine.sequence import Sequence


class LiveSequences:
    """All that have not ended. A name is taken as long as its sequence or its sample lives. Touched by the engine thread only."""

    def __init__(self) -> None:
        self._by_sample: dict[str, Sequence] = {}
        self._by_sequence: dict[str, list[Sequence]] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return (sample for samples in self._by_sequence.values() for sample in samples)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._by_sample

    def add(self, sequence: Sequence) -> None:
        """A new one, under the names of all its samples."""
        self._by_sequence[sequence.seq_id] = [sequence]
        self._by_sample.update((sample_id, sequence) for sample_id in sequence.sample_ids)

    def check_new(self, sequence: Sequence) -> None:
        """Raises EngineError when one of its names is taken."""
        for name in (sequence.seq_id, *sequence.sample_ids):
            if name in self._by_sequence or name in self._by_sample:
                raise EngineError(f"sequence {name} is there already")

    def sample(self, sample_id: str) -> Sequence | None:
        """The one that stands for a sample."""
        return self._by_sample.get(sample_id)

    def samples_of(self, seq_id: str) -> tuple[Sequence, ...]:
        """The live ones of a sequence."""
        return tuple(self._by_sequence.get(seq_id, ()))

    def forked(self, samples: list[Sequence]) -> None:
        """The first of these stood for them all until now."""
        self._by_sequence[samples[0].seq_id].extend(samples[1:])
        self._by_sample.update((each.sample_id, each) for each in samples)

    def remove(self, sequence: Sequence) -> None:
        """It has ended."""
        for sample_id in sequence.sample_ids:
            del self._by_sample[sample_id]
        samples = self._by_sequence[sequence.seq_id]
        samples.remove(sequence)
        if not samples:
            del self._by_sequence[sequence.seq_id]
