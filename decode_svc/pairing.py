"""The pairing with one prefill instance, kept up as long as decode runs: made, chosen anew when its transport fails, made again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Self

from decode_svc.paired import Paired, PathEvent
from decode_svc.pairing_attempt import NotPairedError, PairingAttempt, PairingParts
from tandem.v1 import kv_pb2

_LOG = logging.getLogger(__name__)
MAX_WAIT_S = 5.0
"""Longest time that a request waits for a pairing."""
BAN_S = 60.0
"""Time for which a transport that failed is not chosen."""
NOT_PAIRED_YET = "not paired yet"
"""The reason in front of the first attempt's end."""
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_SETTLED_S = 5.0


def _to_nobody(_: PathEvent) -> None:
    """The log is enough."""


class PeerPairing:
    """Runs a task of its own between `start` and `close`. Lives on the event loop."""

    def __init__(self, parts: PairingParts, on_event: Callable[[PathEvent], None] = _to_nobody) -> None:
        self._parts = parts
        self._on_event = on_event
        self._paired: Paired | None = None
        self._retired: set[Paired] = set()
        self._failure = NotPairedError(NOT_PAIRED_YET)
        self._reason = str(self._failure)
        """Why there is no pairing, or no faster path."""
        self._banned: dict[str, float] = {}
        """Transports that failed, and when they may be chosen again (the loop's time)."""
        self._has_paired = False
        self._num_attempts = 0
        self._num_ended = 0
        """Attempts that have come to an end."""
        self._num_waiting = 0
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to pair. The loop must be running."""
        self._task = asyncio.create_task(self._run(), name=f"pairing {self._parts.instance}")
        self._task.add_done_callback(_log_death)

    async def close(self) -> None:
        """Ends the pairing, whoever uses it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for paired in (*self._retired, *((self._paired,) if self._paired else ())):
            paired.close()
        self._paired = None
        self._retired.clear()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def is_paired(self) -> bool:
        """A request would not have to wait."""
        return self._paired is not None and self._paired.is_open

    def report(self) -> kv_pb2.KvPath:
        """The path as it is now."""
        if self._paired is None:
            return kv_pb2.KvPath(prefill_instance=self._parts.instance, reason=self._reason)
        path = self._paired.path
        return kv_pb2.KvPath(prefill_instance=self._parts.instance, transport=path.transport, bytes_per_s=path.bytes_per_s, reason=self._reason)

    async def paired(self, timeout_s: float = MAX_WAIT_S) -> Paired:
        """The open pairing; without one an attempt begins at once.

        Raises NotPairedError when an attempt that began later than this call has failed, or when the time, at most MAX_WAIT_S, is over.
        """
        if self._paired is not None and self._paired.is_open:
            return self._paired
        num_begun = self._num_attempts
        self._num_waiting += 1
        self._wanted.set()
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WAIT_S)):
                while not self.is_paired and self._num_ended <= num_begun:
                    await self._news.wait()
        except TimeoutError:
            if not self.is_paired:
                raise NotPairedError(f"not paired in time: {self._failure}") from None
        finally:
            self._num_waiting -= 1
        if self._paired is None or not self._paired.is_open:
            raise NotPairedError(str(self._failure), pairs=self._failure.pairs)
        return self._paired

    async def _run(self) -> None:
        loop, backoff_s = asyncio.get_running_loop(), _MIN_BACKOFF_S
        while True:
            began = loop.time()
            try:
                paired, reasons = await self._pair()
            except NotPairedError as error:
                self._not_paired(error)
            else:
                self._take(paired, reasons)
                self._lost(await self._until_lost())
                backoff_s = _MIN_BACKOFF_S if loop.time() - began > _SETTLED_S else backoff_s
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _pair(self) -> tuple[Paired, dict[str, str]]:
        """By a transport that may be chosen, or by any: one that failed is better than none."""
        try:
            return await self._attempt(self._allowed())
        except NotPairedError:
            if not self._banned:
                raise
            self._banned.clear()
            return await self._attempt(self._allowed())

    async def _attempt(self, transports: list[str]) -> tuple[Paired, dict[str, str]]:
        self._num_attempts += 1
        number = self._num_attempts
        try:
            return await PairingAttempt.of(self._parts, transports).run()
        except NotPairedError:
            raise
        except Exception as error:  # a reader's fault: it must not end the keeping up
            _LOG.exception("pairing with %s failed", self._parts.instance)
            raise NotPairedError(f"{type(error).__name__}: {error}") from error
        finally:
            self._num_ended = number

    async def _pause(self, backoff_s: float) -> None:
        """Until the next attempt, which a request that waits wants at once."""
        # Who waited for the attempt that has just ended leaves first: he would seem to ask for one more, and attempts that fail without a wait would never end.
        await asyncio.sleep(0)
        if self._num_waiting:
            return
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff_s):
                await self._wanted.wait()

    async def _until_lost(self) -> str:
        """Keeps the pairing up, chooses anew when it must, and returns why there is none any more."""
        while True:
            paired = self._paired
            assert paired is not None
            free_at = min(self._banned.values(), default=None)
            loop = asyncio.get_running_loop()
            timeout_s = None if free_at is None else max(free_at - loop.time(), 0.0)
            await asyncio.wait({paired.ended, paired.failing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if paired.ended.done():
                return paired.end_reason()
            if paired.failing.done():
                await self._choose_another(paired, paired.failing.result())
            else:
                await self._choose_freely(paired)

    async def _choose_another(self, paired: Paired, reason: str) -> None:
        """Without the transport that failed, if any other one can be had. The old pairing stays for those who use it."""
        failed = paired.path.transport
        others = [name for name in self._allowed() if name != failed]
        try:
            if not others:
                raise NotPairedError("there is no other transport")
            chosen, reasons = await self._attempt(others)
        except NotPairedError as error:
            _LOG.warning("KV from %s stays on %s, though %s: %s", self._parts.instance, failed, reason, error)
            paired.keep()
            return
        if paired.ended.done():  # the instance was gone, and not the transport at fault
            chosen.close()
            return
        self._ban(failed)
        self._take(chosen, {**reasons, failed: reason})

    async def _choose_freely(self, paired: Paired) -> None:
        """The time of a ban is over: what is preferred is tried, now and, if it is not to be had, after the time of another one."""
        allowed = self._allowed()
        place = allowed.index(paired.path.transport)
        if place == 0:
            return
        try:
            chosen, reasons = await self._attempt(allowed[: place + 1])
        except NotPairedError as error:
            _LOG.warning("KV from %s stays on %s: %s", self._parts.instance, paired.path.transport, error)
        else:
            if chosen.path.transport != paired.path.transport:
                self._take(chosen, reasons)
                return
            chosen.close()
            _LOG.info("KV from %s stays on %s: %s", self._parts.instance, paired.path.transport, reasons)
        for name in allowed[:place]:
            self._ban(name)

    def _ban(self, name: str) -> None:
        self._banned[name] = asyncio.get_running_loop().time() + BAN_S

    def _allowed(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        self._banned = {name: until for name, until in self._banned.items() if until > now}
        return [name for name in self._parts.transports if name not in self._banned]

    def _take(self, paired: Paired, reasons: Mapping[str, str]) -> None:
        """`reasons` say of other transports why they were not chosen; those that would not have been preferred are not told."""
        old, path = self._paired, paired.path
        preferred = self._parts.transports[: self._parts.transports.index(path.transport)]
        reason = "; ".join(f"{name}: {text}" for name, text in reasons.items() if name in preferred or (old and name == old.path.transport))
        self._paired, self._reason = paired, reason
        event = PathEvent(self._parts.instance, old.path.transport if old else "", path.transport, path.bytes_per_s, reason, first=not self._has_paired)
        paired.news = None if event.first else event
        self._has_paired = True
        if old is not None:
            self._retired.add(old)
            old.ended.add_done_callback(lambda _: self._retired.discard(old))
            old.retire()
        rate = f"{path.bytes_per_s / 1e9:.3f} GB/s"
        why = f"; {reason}" if reason else ""
        if event.first:
            _LOG.info("KV comes from %s by %s (%s)%s", event.instance, event.new, rate, why)
        else:
            _LOG.warning("the KV path from %s has changed from %s to %s (%s)%s", event.instance, event.old or "none", event.new, rate, why)
        self._tell(event)

    def _lost(self, reason: str) -> None:
        assert self._paired is not None
        old, self._paired = self._paired, None
        old.close()
        self._failure, self._reason = NotPairedError(reason), reason
        _LOG.warning("the KV path from %s has changed from %s to none: %s", self._parts.instance, old.path.transport, reason)
        self._tell(PathEvent(self._parts.instance, old.path.transport, "", 0.0, reason))

    def _not_paired(self, error: NotPairedError) -> None:
        known, self._failure, self._reason = self._reason == str(error), error, str(error)
        level = logging.DEBUG if known else logging.WARNING if self._has_paired or not error.pairs else logging.INFO  # it may not have started yet
        _LOG.log(level, "not paired with %s: %s", self._parts.instance, error)
        self._tell(None if known else PathEvent(self._parts.instance, "", "", 0.0, self._reason))

    def _tell(self, event: PathEvent | None) -> None:
        self._news.set()
        self._news = asyncio.Event()
        if event is not None:
            self._on_event(event)


def _log_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.critical("%s has died and will not pair again", task.get_name(), exc_info=error)
