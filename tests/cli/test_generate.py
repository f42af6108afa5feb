"""`generate` and `chat` against a scripted gateway over real gRPC."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from cli.errors import UserError
from cli.generate import Chat, GenerateOptions, generate
from cli.generation import Generation, gateway_client
from cli.sample_writer import SampleWriter
from cli.sampling import sampling_flags
from rpc.server import RpcServer
from tandem_client import Finish, FinishReason, Piece
from tests.cli.scripted_service import WORDS, ScriptedGateway, add_gateway

_ANSWER = "".join(WORDS)


async def _start(script: str) -> tuple[RpcServer, ScriptedGateway]:
    server = RpcServer("scripted")
    gateway = add_gateway(server, script)
    await server.start()
    server.set_ready(True)
    return server, gateway


@pytest.fixture
async def scripted(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    server, gateway = await _start(getattr(request, "param", ""))
    yield f"127.0.0.1:{server.port}", gateway
    await server.drain(1)


def _options(target: str, system: str | None = None) -> GenerateOptions:
    return GenerateOptions(target, system, {"max_tokens": 8})


async def test_generate_streams_text_and_sends_the_chat(scripted: tuple[str, ScriptedGateway]) -> None:
    target, gateway = scripted
    pieces: list[str] = []
    await generate("Capital of France?", _options(target, "Be brief."), raw=False, write=pieces.append, console=Console(file=io.StringIO()))
    assert pieces == [*WORDS, "\n"]
    assert [(turn.role, turn.content) for turn in gateway.requests[0].chat.messages] == [("system", "Be brief."), ("user", "Capital of France?")]


async def test_raw_prompt_goes_without_the_chat_template(scripted: tuple[str, ScriptedGateway]) -> None:
    target, gateway = scripted
    await generate("Once upon", _options(target), raw=True, write=lambda _: None, console=Console(file=io.StringIO()))
    assert gateway.requests[0].text == "Once upon"


async def test_summary_names_tokens_and_path_on_a_terminal(scripted: tuple[str, ScriptedGateway]) -> None:
    out = io.StringIO()
    await generate("x", _options(scripted[0]), raw=False, write=lambda _: None, console=Console(file=out, force_terminal=True, width=200, color_system=None))
    assert "30 + 6 tokens (16 cached)" in out.getvalue()
    assert "path handover" in out.getvalue()


async def test_samples_are_written_whole_one_below_the_other(scripted: tuple[str, ScriptedGateway]) -> None:
    pieces: list[str] = []
    options = replace(_options(scripted[0]), sampling={"n": 3}, echo=True)
    await generate("x", options, raw=True, write=pieces.append, console=Console(file=io.StringIO()))
    loud = _ANSWER.upper()
    assert "".join(pieces) == f"--- 1 of 3 ---\n{_ANSWER}\n--- 2 of 3 ---\n{loud}\n--- 3 of 3 ---\n{loud}\n"
    assert pieces[1 : 1 + len(WORDS)] == list(WORDS), "the first one streams"
    assert (scripted[1].requests[0].echo, scripted[1].requests[0].sampling_params.n) == (True, 3)


def test_samples_that_break_off_are_shown_as_far_as_they_came() -> None:
    pieces: list[str] = []
    writer = SampleWriter(3, pieces.append)
    for index, text, finish in ((2, "third", None), (0, "", Finish(FinishReason.STOP)), (1, "sec", None)):
        writer.add(Piece(text, (), (), index, 0, finish))
    writer.break_off()
    assert "".join(pieces) == "--- 1 of 3 ---\n\n--- 2 of 3 ---\nsec\n--- 3 of 3 ---\nthird\n"
    refused: list[str] = []
    SampleWriter(3, refused.append).break_off()
    assert refused == []


def test_flags_become_parameters_and_what_is_not_given_stays_unset() -> None:
    flags = sampling_flags(n=2, min_tokens=None, stop=[], presence_penalty=0.5, bad_words=["x"], logit_bias=["5=-100", "7=2.5"])
    assert flags == {"n": 2, "presence_penalty": 0.5, "bad_words": ["x"], "logit_bias": {5: -100.0, 7: 2.5}}
    for wrong in ("5", "x=1", "5=y", "=1"):
        with pytest.raises(UserError, match="ID=VALUE"):
            sampling_flags(logit_bias=[wrong])
    with pytest.raises(UserError):
        sampling_flags(n=2**40)
    with pytest.raises(UserError):
        sampling_flags(logit_bias=["-1=5"])


@pytest.mark.parametrize("scripted", ["refuse"], indirect=True)
async def test_refusal_says_reason_and_when_to_come_back(scripted: tuple[str, ScriptedGateway]) -> None:
    with pytest.raises(UserError, match=r"RESOURCE_EXHAUSTED QUEUE_FULL: the queue holds 64 requests; try again in 1\.5 s"):
        await generate("x", _options(scripted[0]), raw=False, write=lambda _: None, console=Console(file=io.StringIO()))


async def test_unreachable_gateway_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match=r"gateway 127\.0\.0\.1:1 cannot be reached \(Connection refused\)") as raised:
        await generate("x", _options("127.0.0.1:1"), raw=False, write=lambda _: None, console=Console(file=io.StringIO()))
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("scripted", ["slow"], indirect=True)
async def test_leaving_a_stream_early_cancels_the_call(scripted: tuple[str, ScriptedGateway]) -> None:
    target, gateway = scripted
    async with gateway_client(target) as client:
        stream = Generation("x", {}).stream(client)
        assert (await anext(stream)).text == WORDS[0]
        await stream.aclose()
        await asyncio.wait_for(gateway.cancelled.wait(), 10)


async def test_measurements_count_tokens_gaps_and_trailers(scripted: tuple[str, ScriptedGateway]) -> None:
    generation = Generation("x", {})
    async with gateway_client(scripted[0]) as client:
        assert "".join([piece.text async for piece in generation.stream(client)]) == _ANSWER
    assert (generation.num_output_tokens, len(generation.gaps_s)) == (len(WORDS), len(WORDS) - 1)
    assert generation.ttft_s is not None
    assert generation.path.kv_transport == "inline"


@contextmanager
def _gateway_in_a_thread(script: str) -> Iterator[tuple[str, ScriptedGateway]]:
    """`chat` owns the main thread and its event loop, as in a terminal."""
    started: list[tuple[RpcServer, ScriptedGateway]] = []
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        started.append(await _start(script))
        ready.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert ready.wait(10)
        server, gateway = started[0]
        yield f"127.0.0.1:{server.port}", gateway
        asyncio.run_coroutine_threadsafe(server.drain(1), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _lines(*lines: str) -> Iterator[str]:
    yield from lines
    raise EOFError


def test_chat_sends_the_whole_conversation() -> None:
    with _gateway_in_a_thread("") as (target, gateway):
        lines = _lines("Hello", "And now?", "/reset", "Anew")
        Chat(_options(target), Console(file=io.StringIO())).run(lambda prompt: next(lines))
    assert [[turn.content for turn in request.chat.messages] for request in gateway.requests] == [["Hello"], ["Hello", _ANSWER, "And now?"], ["Anew"]]


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """As at a terminal: a job that a shell has put into the background starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
def test_ctrl_c_cancels_the_answer_and_not_the_chat() -> None:
    out = io.StringIO()

    def interrupt_after_the_third_word(text: str) -> None:
        if text == WORDS[2]:
            os.kill(os.getpid(), signal.SIGINT)

    with _gateway_in_a_thread("slow") as (target, gateway):
        lines = _lines("Hello", "Still there?")
        Chat(_options(target), Console(file=out), interrupt_after_the_third_word).run(lambda prompt: next(lines))
    assert out.getvalue().count("cancelled") == 2
    assert [turn.content for turn in gateway.requests[1].chat.messages] == ["Hello", "".join(WORDS[:3]), "Still there?"]


def test_first_turn_with_an_unreachable_gateway_ends_the_chat() -> None:
    lines = _lines("Hello")
    with pytest.raises(UserError, match="cannot be reached"):
        Chat(_options("127.0.0.1:1"), Console(file=io.StringIO())).run(lambda prompt: next(lines))
