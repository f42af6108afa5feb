"""A process of its own with a GPU runtime in it, driven from here: what gpu-check's two processes are. Imports neither gRPC nor protobuf.

python -m checks.cuda_peer <descriptor of a unix socket> <module:function that makes the process's Work>
"""

from __future__ import annotations

import importlib
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any, cast

from kvtransfer.cuda_runtime import CudaError, CudaRuntime

_LENGTH = struct.Struct("<Q")
_TIMEOUT_S = 120.0
_MAX_FDS = 4


class PeerFailedError(Exception):
    """What the process was asked to do failed there, and not with an error of CUDA's."""


def _send(connection: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    body = pickle.dumps(message)
    socket.send_fds(connection, [_LENGTH.pack(len(body))], list(fds))
    connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Raises EOFError when the other end is gone. Both ends are this program's own, so pickle is no risk."""
    header, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_FDS)
    if len(header) < _LENGTH.size:
        raise EOFError("the other end is gone")
    body = bytearray(_LENGTH.unpack(header)[0])
    view = memoryview(body)
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise EOFError("the other end is gone")
        view = view[num_bytes:]
    return pickle.loads(body), list(fds)


class Peer:
    """The driving side. `call` runs a method of the process's Work there, and waits for it."""

    def __init__(self, name: str, work: str) -> None:
        """Starts the process; it is up when the first call returns."""
        self.name = name
        ours, its = socket.socketpair()
        self._connection = ours
        self._connection.settimeout(_TIMEOUT_S)
        with its:
            command = [sys.executable, "-m", "checks.cuda_peer", str(its.fileno()), work]
            # Not forked: a process that has touched CUDA must not be.
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()])

    def call(self, method: str, *arguments: object, fds: Sequence[int] = ()) -> Any:
        """What the method returned. Raises CudaError as the method did, PeerFailedError for any other error."""
        return self.call_for_fds(method, *arguments, fds=fds)[0]

    def call_for_fds(self, method: str, *arguments: object, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        """The same, with the descriptors that came back; they are the caller's to close."""
        try:
            _send(self._connection, (method, arguments), fds)
            (outcome, value), received = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise PeerFailedError(f"{self.name} is gone in {method}: {error}") from error
        if outcome == "cuda":
            raise CudaError(value)
        if outcome != "ok":
            raise PeerFailedError(f"{self.name}: {method}: {value}")
        return value, received

    @property
    def runtime(self) -> CudaRuntime:
        """The process's runtime, each call of it made there."""
        return cast(CudaRuntime, _Forwarded(self))

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone. Idempotent."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def close(self) -> None:
        """Lets the process end by itself, or kills it. Idempotent."""
        self._connection.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


class _Forwarded:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __getattr__(self, name: str) -> object:
        if name in ("process_id", "device_uuid"):
            return self._peer.call("runtime_attribute", name)
        return lambda *arguments: self._peer.call("runtime_call", name, *arguments)


class Work:
    """What a process does when it is asked to; more of it in cuda_work."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self.received_fds: list[int] = []
        """Descriptors that came with the present call."""
        self.sent_fds: list[int] = []
        """Those that go with its answer."""

    def runtime_attribute(self, name: str) -> Any:
        """An attribute of the runtime."""
        return getattr(self.runtime, name)

    def runtime_call(self, name: str, *arguments: object) -> Any:
        """A call of the runtime."""
        return getattr(self.runtime, name)(*arguments)


def answer(work: Work, method: str, arguments: Sequence[object]) -> tuple[str, object]:
    """What a call comes to: ok and the result, or cuda or failed and the reason."""
    try:
        return "ok", getattr(work, method)(*arguments)
    except CudaError as error:
        return "cuda", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=4)}"


def serve(connection: socket.socket, work: Work) -> None:
    """Answers calls until the other end is gone."""
    while True:
        try:
            (method, arguments), work.received_fds = _receive(connection)
        except EOFError:
            return
        work.sent_fds = []
        _send(connection, answer(work, method, arguments), work.sent_fds)


def main() -> None:
    """The process."""
    module, _, function = sys.argv[2].partition(":")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    main()
