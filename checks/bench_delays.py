"""Delays that are known ahead: what a server of the check does with a request is drawn from the request itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

_TTFT_MEDIAN_S, _TTFT_SIGMA = 0.060, 0.5
_GAP_MEAN_S, _GAP_SHAPE = 0.015, 6.0
_PAUSE_SHARE, _PAUSE_S = 0.03, 0.080
_FAULTY_SHARE = 0.4


class Kind(StrEnum):
    """What becomes of a request."""

    GOOD = "good"
    REFUSED = "refused"
    FAILED_FIRST = "failed at once"
    FAILED_LATE = "failed behind its second token"
    SHORT = "a token too few, and said so"
    LONG = "a token too many, and said so"
    FALSE_USAGE = "all tokens, and a usage of one more"
    STOPPED = "all tokens, and another finish reason"


_FAULTS = tuple(kind for kind in Kind if kind is not Kind.GOOD)


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds from when a request has come in."""

    kind: Kind
    at_s: tuple[float, ...]
    """When each token is sent."""


def key_of(token_ids: Iterable[int]) -> int:
    """Names a request by its prompt: the one thing that both ends have of it, whatever the protocol."""
    return zlib.crc32(np.fromiter(token_ids, np.uint32).tobytes())


def course_of(key: int, max_tokens: int, *, faults: bool) -> Course:
    """TTFT is log-normal, gaps are gamma-distributed with a long pause now and then."""
    random = np.random.default_rng(key)
    kind = _FAULTS[int(random.integers(len(_FAULTS)))] if random.random() < _FAULTY_SHARE and faults else Kind.GOOD
    first_s = float(random.lognormal(np.log(_TTFT_MEDIAN_S), _TTFT_SIGMA))
    gaps = random.gamma(_GAP_SHAPE, _GAP_MEAN_S / _GAP_SHAPE, max_tokens)
    gaps = np.where(random.random(max_tokens) < _PAUSE_SHARE, _PAUSE_S, gaps)
    num_tokens = {Kind.REFUSED: 0, Kind.FAILED_FIRST: 0, Kind.FAILED_LATE: 2, Kind.SHORT: max_tokens - 1, Kind.LONG: max_tokens + 1}.get(kind, max_tokens)
    return Course(kind, tuple(float(at) for at in first_s + np.concatenate([[0.0], np.cumsum(gaps)])[:num_tokens]))
