"""How to stop a request in each phase of a hand-over, and how to see that it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpc.failpoints import configure_failpoints, num_waiting_at
from tests.support.cluster import Cluster

Phase = tuple[Callable[[Cluster], None], Callable[[Cluster], bool]]


def _failpoint(name: str) -> Callable[[Cluster], None]:
    return lambda cluster: configure_failpoints(f"{name}=delay:30")


def gate_prefill(cluster: Cluster) -> None:
    """The first prefill instance computes nothing before `open_gates`."""
    device = cluster.prefills[0].device
    device.entered.clear()
    device.gate = threading.Event()


def gate_decode(cluster: Cluster) -> None:
    """The same for decode."""
    device = cluster.decode.device
    device.entered.clear()
    device.gate = threading.Event()


def open_gates(cluster: Cluster) -> None:
    """Every device goes on."""
    for device in (cluster.decode.device, *(node.device for node in cluster.prefills)):
        if device.gate is not None:
            device.gate.set()


def _holds_at(name: str) -> Callable[[Cluster], bool]:
    """The prompt is computed and its owner stands at the failpoint: one that is lifted before anybody is there stops nothing."""
    return lambda cluster: cluster.prefills[0].engine.load().num_in_handover == 1 and num_waiting_at(name) == 1


IN_PREFILL: dict[str, Phase] = {
    "prefill.queue": (_failpoint("prefill.queue"), lambda cluster: cluster.prefills[0].server.num_active_rpcs == 1),
    "prefill": (gate_prefill, lambda cluster: cluster.prefills[0].device.entered.is_set()),
    "first token": (_failpoint("prefill"), lambda cluster: num_waiting_at("prefill") == 1),
    "kv_transfer": (_failpoint("kv_transfer"), _holds_at("kv_transfer")),
    "kv.hold": (_failpoint("kv.hold"), _holds_at("kv.hold")),
}
"""From the call of prefill to its end."""
PHASES: dict[str, Phase] = {
    "reserve": (_failpoint("reserve"), lambda cluster: cluster.decode.server.num_active_rpcs == 1),
    **IN_PREFILL,
    "decode": (gate_decode, lambda cluster: cluster.decode.device.entered.is_set()),
}
"""All of a request."""
