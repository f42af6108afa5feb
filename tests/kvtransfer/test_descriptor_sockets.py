"""Descriptors go to who proves the pairing's key, once, and whoever fails ends only his own connection."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from kvtransfer.descriptor_sockets import MAX_DESCRIPTORS, MAX_PAYLOAD_BYTES, DescriptorSockets, SocketLimits, fetch, remove_leftovers, socket_path
from kvtransfer.errors import HandoverProtocolError, NoTransportError
from kvtransfer.packet_socket import ClosedError, packet_socket, receive, receive_fds, send
from kvtransfer.pairing import proof
from tests.kvtransfer.ends import until

PAIRING, KEY, PURPOSE = "ab" * 16, bytes(range(32)), "shared_memory"


def _num_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def fd() -> Iterator[int]:
    """A file with a word in it."""
    made = os.memfd_create("word")
    os.write(made, b"word")
    yield made
    os.close(made)


@asynccontextmanager
async def _open(directory: Path, limits: SocketLimits | None = None) -> AsyncIterator[DescriptorSockets]:
    sockets = DescriptorSockets(directory, limits)
    sockets.start()
    try:
        yield sockets
    finally:
        await sockets.close()


@pytest.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[DescriptorSockets]:
    async with _open(tmp_path) as opened:
        yield opened


async def _word(directory: Path, name: str, key: bytes = KEY, purpose: str = PURPOSE, pairing_id: str = PAIRING) -> bytes:
    """The word of the file that is fetched."""
    async with fetch(socket_path(directory, name), pairing_id, key, purpose, timeout_s=5) as fetched:
        assert fetched.payload == b"payload" and not os.get_inheritable(fetched.fds[0])
        return os.pread(fetched.fds[0], 4, 0)


def _greeting(key: bytes = KEY, version: bytes = b"tandem\0\1", pairing_id: str = PAIRING) -> bytes:
    return version + PURPOSE.encode().ljust(16, b"\0") + pairing_id.encode() + proof(key, f"decode {PURPOSE}")


def _connected(directory: Path, name: str) -> socket.socket:
    connection = packet_socket()
    connection.connect(str(directory / name))
    return connection


async def _is_ended(connection: socket.socket) -> bool:
    with pytest.raises((ClosedError, OSError)):
        await asyncio.wait_for(receive(connection, 32), 5)
    return True


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_who_proves_the_key_gets_payload_and_descriptor_once_on_any_event_loop(run: Callable[[Awaitable[None]], None], tmp_path: Path, fd: int) -> None:
    async def life() -> None:
        before = _num_fds()
        async with _open(tmp_path) as sockets:
            sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
            assert await _word(tmp_path, sockets.name) == b"word"
            with pytest.raises(NoTransportError):
                await _word(tmp_path, sockets.name)
            assert _num_fds() == before + 1  # the one that listens
            silent = _connected(tmp_path, sockets.name)
        assert await _is_ended(silent)
        silent.close()
        assert _num_fds() == before
        assert os.listdir(tmp_path) == []

    run(life())


async def test_who_does_not_know_the_key_gets_nothing_and_takes_nothing_from_who_does(sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    for key, pairing_id, purpose in ((bytes(32), PAIRING, PURPOSE), (KEY, "cd" * 16, PURPOSE), (KEY, PAIRING, "cuda_ipc")):
        with pytest.raises(NoTransportError, match="closed"):
            await _word(tmp_path, sockets.name, key, purpose, pairing_id)
    assert await _word(tmp_path, sockets.name) == b"word"


async def test_a_payload_without_descriptors_is_given_once_too(sockets: DescriptorSockets, tmp_path: Path) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload")
    async with fetch(socket_path(tmp_path, sockets.name), PAIRING, KEY, PURPOSE, num_fds=0) as fetched:
        assert fetched.payload == b"payload"
    with pytest.raises(NoTransportError):
        async with fetch(socket_path(tmp_path, sockets.name), PAIRING, KEY, PURPOSE, num_fds=0):
            pass


async def test_of_two_at_once_one_gets_it(sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    results = await asyncio.gather(*(_word(tmp_path, sockets.name) for _ in range(8)), return_exceptions=True)
    assert results.count(b"word") == 1
    assert sum(isinstance(result, NoTransportError) for result in results) == 7


async def test_each_purpose_of_a_pairing_is_fetched_by_itself(sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    sockets.publish(PAIRING, KEY, "cuda_ipc", b"payload", [fd])
    sockets.withdraw(PAIRING, PURPOSE)
    assert await _word(tmp_path, sockets.name, purpose="cuda_ipc") == b"word"
    with pytest.raises(NoTransportError):
        await _word(tmp_path, sockets.name)


@pytest.mark.parametrize(
    "packet",
    [b"x", b"x" * 200_000, _greeting(version=b"tandem\0\2"), _greeting(bytes(32)), _greeting()[:-1], _greeting() + b"x", b"\xff" * 88, None],
    ids=["short", "huge", "version", "key", "a byte less", "a byte more", "no text", "closed"],
)
async def test_a_wrong_greeting_ends_its_connection_and_no_other(packet: bytes | None, sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    with _connected(tmp_path, sockets.name) as connection:
        if packet is None:
            connection.shutdown(socket.SHUT_RDWR)
        else:
            await send(connection, packet)
        assert await _is_ended(connection)
        assert await _word(tmp_path, sockets.name) == b"word"


async def test_descriptors_sent_to_prefill_are_dropped(sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    before = _num_fds()
    with _connected(tmp_path, sockets.name) as connection:
        await send(connection, _greeting(), [fd])
        assert await _is_ended(connection)
    assert _num_fds() == before


@pytest.mark.parametrize("answer", [b"\0", b"\1\1", None], ids=["no", "too long", "closed"])
async def test_without_consent_nothing_is_given(answer: bytes | None, sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    before = _num_fds()
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    with _connected(tmp_path, sockets.name) as connection:
        await send(connection, _greeting())
        assert await receive(connection, 32) == proof(KEY, f"prefill {PURPOSE}")
        if answer is None:
            connection.shutdown(socket.SHUT_RDWR)
        else:
            await send(connection, answer)
        assert await _is_ended(connection)
    await until(lambda: _num_fds() == before)


async def test_a_withdrawn_descriptor_is_not_given_to_who_has_proved_the_key_already(sockets: DescriptorSockets, tmp_path: Path, fd: int) -> None:
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    with _connected(tmp_path, sockets.name) as connection:
        await send(connection, _greeting())
        await receive(connection, 32)
        sockets.withdraw(PAIRING, PURPOSE)
        await send(connection, b"\1")
        assert await _is_ended(connection)


async def test_slow_ones_wait_alone_and_not_for_ever(tmp_path: Path, fd: int) -> None:
    async with _open(tmp_path, SocketLimits(max_connections=2, timeout_s=0.3)) as sockets:
        sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
        with ExitStack() as stack:
            first = stack.enter_context(_connected(tmp_path, sockets.name))
            assert await _word(tmp_path, sockets.name) == b"word"
            sockets.publish("cd" * 16, KEY, PURPOSE, b"payload", [fd])
            second = stack.enter_context(_connected(tmp_path, sockets.name))
            third = stack.enter_context(_connected(tmp_path, sockets.name))
            assert await _word(tmp_path, sockets.name, pairing_id="cd" * 16) == b"word"  # when places are free again
            for connection in (first, second, third):
                assert await _is_ended(connection)


async def test_another_users_process_is_refused_at_both_ends(tmp_path: Path, fd: int) -> None:
    def foreign(connection: socket.socket) -> int:
        return os.geteuid() + 1

    async with _open(tmp_path, SocketLimits(uid_of=foreign)) as sockets:
        sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
        with pytest.raises(NoTransportError):
            await _word(tmp_path, sockets.name)
    async with _open(tmp_path) as sockets:
        sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
        with pytest.raises(NoTransportError, match="belongs to user"):
            async with fetch(socket_path(tmp_path, sockets.name), PAIRING, KEY, PURPOSE, uid_of=foreign):
                pass
        assert await _word(tmp_path, sockets.name) == b"word"


async def test_credentials_are_the_kernels_word(tmp_path: Path) -> None:
    seen: list[int] = []

    def ask(connection: socket.socket) -> int:
        seen.append(SocketLimits().uid_of(connection))
        return seen[-1]

    async with _open(tmp_path, SocketLimits(uid_of=ask)) as sockets:
        with pytest.raises(NoTransportError):
            async with fetch(socket_path(tmp_path, sockets.name), PAIRING, KEY, PURPOSE, uid_of=ask):
                pass
    assert seen == [os.geteuid()] * 2


_Answers = Callable[[socket.socket, int], Awaitable[None]]


async def _fetched_from(tmp_path: Path, fd: int, answers: _Answers) -> None:
    """Fetches from somebody who listens and answers so."""
    name = secrets.token_hex(16)
    with packet_socket() as listener:
        listener.bind(str(tmp_path / name))
        listener.listen()

        async def listen() -> None:
            await until(lambda: _accepted(listener, accepted))
            with accepted[0]:
                await receive(accepted[0], 88)
                await answers(accepted[0], fd)

        accepted: list[socket.socket] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            async with fetch(socket_path(tmp_path, name), PAIRING, KEY, PURPOSE, timeout_s=0.5):
                pass


def _accepted(listener: socket.socket, accepted: list[socket.socket]) -> bool:
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return False
    connection.setblocking(False)
    accepted.append(connection)
    return True


async def _says_nothing(connection: socket.socket, fd: int) -> None:
    await _is_ended(connection)


async def _has_no_key(connection: socket.socket, fd: int) -> None:
    await send(connection, bytes(32), [fd])
    await send(connection, b"payload", [fd])
    await _is_ended(connection)


async def _grants(connection: socket.socket, packet: bytes, fds: list[int]) -> None:
    await send(connection, proof(KEY, f"prefill {PURPOSE}"))
    await receive(connection, 1)
    await send(connection, packet, fds)
    await _is_ended(connection)


async def _gives_too_many(connection: socket.socket, fd: int) -> None:
    await _grants(connection, b"payload", [fd] * (MAX_DESCRIPTORS + 1))


async def _gives_another_number(connection: socket.socket, fd: int) -> None:
    await _grants(connection, b"payload", [fd, fd])


async def _gives_none(connection: socket.socket, fd: int) -> None:
    await _grants(connection, b"payload", [])


async def _gives_too_much(connection: socket.socket, fd: int) -> None:
    await _grants(connection, bytes(MAX_PAYLOAD_BYTES + 1), [fd])


async def _goes(connection: socket.socket, fd: int) -> None:
    connection.close()


@pytest.mark.parametrize("answers", [_says_nothing, _has_no_key, _gives_too_many, _gives_another_number, _gives_none, _gives_too_much, _goes])
async def test_decode_takes_nothing_from_who_does_not_keep_to_it(answers: _Answers, tmp_path: Path, fd: int) -> None:
    before = _num_fds()
    with pytest.raises(ExceptionGroup) as raised:
        await _fetched_from(tmp_path, fd, answers)
    assert all(isinstance(error, NoTransportError) for error in raised.value.exceptions)
    assert _num_fds() == before


async def test_a_cancelled_fetch_leaves_no_descriptor(tmp_path: Path, fd: int) -> None:
    before = _num_fds()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await _fetched_from(tmp_path, fd, _says_nothing)
    assert _num_fds() == before


@pytest.mark.parametrize("name", ["", "..", "/tmp/" + "a" * 27, "a" * 31, "a" * 33, "A" * 32, "a" * 32 + "\n", "../" + "a" * 29])
def test_a_name_that_is_none_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(HandoverProtocolError):
        socket_path(tmp_path, name)


async def test_a_socket_that_is_not_in_the_directory_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(NoTransportError, match="both need the same directory"):
        await _word(tmp_path, "a" * 32)


async def test_leftovers_go_and_what_listens_or_is_no_socket_stays(sockets: DescriptorSockets, tmp_path: Path) -> None:
    left, file, unfinished, old = (tmp_path / name for name in ("a" * 32, "b" * 32, "c" * 32 + ".new", "d" * 32 + ".new"))
    for path in (left, unfinished, old):
        with packet_socket() as dead:
            dead.bind(str(path))
    os.utime(old, (0, 0))
    file.touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NoTransportError, match="refused"):
        await _word(tmp_path, left.name)
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == {sockets.name, file.name, unfinished.name, "notes.txt"}


async def test_what_cannot_be_published_leaves_no_descriptor(sockets: DescriptorSockets, fd: int) -> None:
    before = _num_fds()
    with pytest.raises(NoTransportError):
        sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd, -1])
    for payload, fds in ((b"", [fd]), (bytes(MAX_PAYLOAD_BYTES + 1), [fd]), (b"payload", [fd] * (MAX_DESCRIPTORS + 1))):
        with pytest.raises(ValueError, match="cannot publish"):
            sockets.publish(PAIRING, KEY, PURPOSE, payload, fds)
    sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    with pytest.raises(ValueError, match="cannot publish"):
        sockets.publish(PAIRING, KEY, PURPOSE, b"payload", [fd])
    sockets.withdraw(PAIRING, PURPOSE)
    sockets.withdraw(PAIRING, PURPOSE)
    assert _num_fds() == before


async def test_a_packet_larger_than_asked_for_is_refused_and_its_descriptors_are_the_callers(fd: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with one, other:
        await send(one, b"four", [fd])
        fds: list[int] = []
        with pytest.raises(HandoverProtocolError):
            await receive_fds(other, 3, 1, fds)
        assert len(fds) == 1
        os.close(fds[0])
