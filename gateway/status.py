"""The gateway's view of itself and of both pools, as GetStatus tells it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from gateway.admission import Admission
from gateway.instances import Instance, Role
from gateway.pools import Pools
from tandem.v1 import gateway_pb2

_ROLES = {Role.PREFILL: gateway_pb2.INSTANCE_ROLE_PREFILL, Role.DECODE: gateway_pb2.INSTANCE_ROLE_DECODE}


def package_version() -> str:
    """Version of the installed distribution; "unknown" when run from a tree that is not installed."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"


def gateway_status(pools: Pools, admission: Admission, *, draining: bool) -> gateway_pb2.GetStatusResponse:
    """Everything as it is now."""
    return gateway_pb2.GetStatusResponse(
        version=package_version(),
        num_requests_running=admission.num_active,
        num_requests_waiting=admission.num_waiting,
        instances=[_instance_status(instance) for instance in pools.instances.values()],
        draining=draining,
    )


def _instance_status(instance: Instance) -> gateway_pb2.InstanceStatus:
    return gateway_pb2.InstanceStatus(name=instance.name, role=_ROLES[instance.role], available=instance.available, reason=instance.reason, load=instance.load)
