"""Full method names: `package.Service/Method`, without the leading slash that gRPC puts in front."""

from __future__ import annotations

from typing import Final

# RPCs that serve requests already running, or look on: no span of their own (their traces would have no request, or 1 MiB in each), and a drain
# neither refuses them (a hand-over in flight still has to open ReadKv) nor waits for them (a watch or a pairing never ends by itself).
_SUPPORT_METHODS: Final = frozenset({"Pair", "ReadKv", "WriteKv", "WatchLoad", "GetMemoryReport", "GetStatus", "ListModels"})
# Of these the ones that only new requests need.
_BEGINNINGS: Final = frozenset({"Pair"})


def method_name(path: str) -> str:
    """`/tandem.v1.DecodeService/Generate` as `tandem.v1.DecodeService/Generate`."""
    return path.removeprefix("/")


def is_request(method: str) -> bool:
    """Whether the RPC is a request, as against health, reflection, load, reports and KV bytes."""
    return not method.startswith("grpc.") and method.rpartition("/")[2] not in _SUPPORT_METHODS


def begins_work(method: str) -> bool:
    """Whether a server that drains refuses the RPC."""
    return is_request(method) or method.rpartition("/")[2] in _BEGINNINGS
