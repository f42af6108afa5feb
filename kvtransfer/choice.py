"""Which path a pairing takes: readers attach in the order of preference and are probed, and the first one that proves itself is taken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from kvtransfer.errors import DigestError, HandoverError, NoTransportError
from kvtransfer.pairing import sources_by_name
from kvtransfer.transport import KvReader
from tandem.v1 import kv_pb2, prefill_pb2

_log = logging.getLogger(__name__)
_NUM_PROBES = 3
_STEP_TIMEOUT_S = 10.0
"""For attaching, and for each probe."""
_MAX_REFUSAL_CHARS = 256
"""More than this is not repeated, in logs and in every report, whatever the peer says."""
MAX_PROBE_BYTES = 64 << 20
"""More than this is not asked of a peer, and no memory given to it, whatever the peer says."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The reader to use, what its probe moved, and why the ones before it were not taken."""

    reader: KvReader
    bytes_per_s: float
    reasons: dict[str, str] = field(default_factory=dict)


async def choose(offer: prefill_pb2.PairResponse, readers: Sequence[KvReader], *, min_bytes_per_s: float, step_timeout_s: float = _STEP_TIMEOUT_S) -> Chosen:
    """Takes the first of `readers` that attaches, moves the probe unharmed and is not slower than the floor; if all are slower, the fastest.

    Readers that are not taken are closed. Raises NoTransportError that says of each reader why it was not taken.
    """
    sources, reasons, slow = sources_by_name(offer), dict[str, str](), list[Chosen]()
    chosen: Chosen | None = None
    try:
        for reader in readers:
            if reader.name not in sources:
                reasons[reader.name] = offer.refusals.get(reader.name, "prefill does not offer it")[:_MAX_REFUSAL_CHARS]
                continue
            try:
                bytes_per_s = await _attach_and_measure(reader, offer, sources[reader.name], step_timeout_s)
            except HandoverError as error:
                reasons[reader.name] = str(error)
                continue
            except Exception as error:
                # What a library does beyond its promises costs its own transport, not the pairing.
                _log.exception("transport %s failed while it was tried", reader.name)
                reasons[reader.name] = f"{type(error).__name__}: {error}"
                continue
            candidate = Chosen(reader, bytes_per_s, reasons)
            if bytes_per_s >= min_bytes_per_s:
                chosen = candidate
                break
            reasons[reader.name] = f"its probe moved {bytes_per_s / 1e9:.3f} GB/s, the floor is {min_bytes_per_s / 1e9:.3f}"
            slow.append(candidate)
        chosen = chosen or max(slow, key=lambda one: one.bytes_per_s, default=None)
        if chosen is None:
            raise NoTransportError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "decode reads by no transport")
        return chosen
    finally:
        for reader in readers:
            if chosen is None or reader is not chosen.reader:
                reader.close()


async def _attach_and_measure(reader: KvReader, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource, step_timeout_s: float) -> float:
    """Bytes per second of the fastest of a few probes. Raises NoTransportError, TransferError."""
    if not 0 < offer.probe_bytes <= MAX_PROBE_BYTES:
        raise NoTransportError(f"prefill's probe has {offer.probe_bytes} bytes")
    try:
        async with asyncio.timeout(step_timeout_s):
            await reader.attach(offer, source)
    except TimeoutError:
        raise NoTransportError(f"attaching took more than {step_timeout_s:g} s") from None
    best = 0.0
    for _ in range(_NUM_PROBES):
        try:
            async with asyncio.timeout(step_timeout_s):
                probe = await reader.probe()
        except TimeoutError:
            raise NoTransportError(f"its probe took more than {step_timeout_s:g} s") from None
        if len(probe.content) != offer.probe_bytes or xxhash.xxh3_64_intdigest(probe.content) != offer.probe_digest:
            raise DigestError("its probe brought other bytes than those that left")
        best = max(best, offer.probe_bytes / max(probe.elapsed_s, 1e-9))
    return best
