"""Which ways to a prompt's KV are left, and what is said when none is."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from decode_svc.failures import AttemptFailedError
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.peers import PrefillPeer
from engine.errors import CapacityError
from rpc.errors import failed_precondition, unavailable

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0


class Attempts:
    """Those at one job: each prefill instance once, as long as there is time for it, then here, if the policy lets it."""

    def __init__(self, rpc: GenerateRpc, peers: Sequence[PrefillPeer]) -> None:
        self.failures: list[AttemptFailedError] = []
        self.no_room: CapacityError | None = None
        """Why a later attempt found no room here."""
        self._rpc = rpc
        self._peers = list(peers)

    def copy(self) -> Attempts:
        """The same for one of several samples that go on by themselves."""
        attempts = Attempts(self._rpc, self._peers)
        attempts.failures, attempts.no_room = self.failures.copy(), self.no_room
        return attempts

    def next_peer(self, job: Job) -> PrefillPeer | None:
        """The next prefill instance to try."""
        if not self._peers or (self.failures and not self._time_for_another(job)):
            return None
        return self._peers.pop(0)

    def failed(self, failure: AttemptFailedError) -> None:
        """Tells of a failure."""
        self.failures.append(failure)
        _LOG.warning("attempt %d at a hand-over failed (%s): %s", len(self.failures), failure.reason, failure)
        self._rpc.pool.metrics.kv_transfer_failures(failure.reason).inc()

    def check_local(self, job: Job) -> None:
        """Raises what the RPC ends with unless the policy lets the job be computed here after its failures."""
        is_short = job.num_tokens <= self._rpc.pool.policy.max_local_prefill_tokens
        if not self._pairs or not is_short or not self._time_for_another(job):
            raise self.error()

    def error(self) -> Exception:
        """What the RPC ends with when nothing is left to try."""
        if not self._pairs:
            text = "; ".join(map(str, self.failures))
            return failed_precondition(text, {failure.instance: failure.description for failure in self.failures})
        if self.no_room is not None and not self._rpc.output.has_sent:
            return self.no_room
        return unavailable("HANDOVER_FAILED", f"{len(self.failures)} attempts failed: {'; '.join(map(str, self.failures))}", _RETRY_S)

    @property
    def _pairs(self) -> bool:
        return any(failure.pairs for failure in self.failures)

    def _time_for_another(self, job: Job) -> bool:
        return self._rpc.remaining_s > self._rpc.pool.pace.predict_s(job.num_tokens)
