"""Servers that answer what no server should: the run ends, its files and page are written, and no miss counts as well."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.record import Outcome, one_line
from bench.report import write_report
from bench.run_files import read_run, write_run
from bench.runner import Runner
from tests.bench.records import run_of
from tests.bench.scripted import DONE, WAIT_S, Asked, HttpScript, event, plan_of_times, scripted_http, send_whole, text_event
from tests.bench.test_openai_target import opened, run_against, sends

_EVIL = "\ud800 \x00\x1b[31m\n<script>x</script>" + "x" * 100_000


def _refuses(status: int) -> HttpScript:
    async def script(_: Asked, writer: asyncio.StreamWriter) -> None:
        await send_whole(writer, status, b'{"error":{"message":"\\ud800 \\u0000\\u001b[31m\\n<script>x</script>%s"}}' % (b"x" * 3000))

    return script


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (_refuses(429), Outcome.REFUSED),
        (_refuses(500), Outcome.FAILED),
        (sends(event({"error": {"message": _EVIL, "code": 503}}), DONE), Outcome.REFUSED),
        (sends(event({"error": _EVIL})), Outcome.FAILED),
        (sends(text_event("a", tokens=3, finish=_EVIL), DONE), Outcome.WRONG),
    ],
)
async def test_what_a_server_says_breaks_neither_file_nor_page_nor_terminal(script: HttpScript, outcome: Outcome, tmp_path: Path) -> None:
    [record], _ = await run_against(script)
    assert record.outcome is outcome
    for said in (record.error, record.finish_reason):
        assert said.isprintable()
        assert len(said) <= 350
        said.encode()
    run = run_of([replace(record, warm_up=False)])
    [read] = read_run(write_run(run, tmp_path)).records
    assert (read.error, read.finish_reason) == (record.error, record.finish_reason)
    assert "<script>" not in write_report(tmp_path / "page.html", [run]).read_text()


async def test_the_fields_of_an_error_side_by_side_with_its_kind_are_one() -> None:
    answer = [*(text_event("x", tokens=number, finish="length" if number == 3 else None) for number in (1, 2, 3))]
    [record], _ = await run_against(sends(*answer, event({"object": "error", "message": "lost", "code": 500}), DONE))
    assert (record.outcome, record.error) == (Outcome.FAILED, "error in the stream: 500 lost")


@pytest.mark.parametrize("placeholder", [0, -5])
async def test_usage_that_stands_still_until_the_end_makes_no_one_fast(placeholder: int) -> None:
    """Else all tokens would seem to come with the last chunk, and TPOT would be 0."""
    pieces: list[bytes | float] = [
        text_event("a", tokens=placeholder),
        0.05,
        text_event("b", tokens=placeholder),
        0.05,
        text_event("c", tokens=3, finish="length"),
        DONE,
    ]
    [record], _ = await run_against(sends(*pieces))
    assert (record.outcome, record.counted_by, len(record.arrived)) == (Outcome.OK, "messages", 3)
    assert record.arrived[-1].at_s - record.arrived[0].at_s > 0.08


@pytest.mark.parametrize("usage", [{"completion_tokens": "many"}, {"completion_tokens": 3, "prompt_tokens": "many"}, {"completion_tokens": float("inf")}])
async def test_usage_that_is_no_number_is_a_failure(usage: dict[str, object]) -> None:
    chunk = {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}], "usage": usage}
    [record], _ = await run_against(sends(event(chunk), DONE))
    assert record.outcome is Outcome.FAILED
    assert record.error.startswith("SseError: no chunk of a completion")


async def test_a_cookie_does_not_bind_the_load_to_one_replica() -> None:
    async def script(_: Asked, writer: asyncio.StreamWriter) -> None:
        body = b'{"error":"no"}'
        writer.write(b"HTTP/1.1 500 X\r\nContent-Type: application/json\r\nSet-Cookie: replica=1; Path=/\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with scripted_http(script) as peer, opened(peer.url.replace("127.0.0.1", "localhost")) as target:
        await asyncio.wait_for(Runner(plan_of_times(0.0, 0.05), target, cold_start=False).run(), WAIT_S)
        assert [asked.headers.get("cookie") for asked in peer.asked] == [None, None]


def test_words_are_shown_as_they_are_where_they_can_be() -> None:
    assert one_line("Zürich:  🎉\n안녕 ") == "Zürich: 🎉 안녕"
    assert one_line("a\x1b[31m\udfffb") == "a\ufffd[31m\ufffdb"
    assert len(one_line("long " * 10_000)) == 300
