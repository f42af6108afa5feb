"""`python -m bench` as a process, against a server of the test."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.main import main
from bench.record import Outcome
from bench.run_files import read_run
from tandem.v1 import gateway_pb2
from tests.bench.scripted import ScriptedGateway, answer, scripted_gateway, scripted_http

_END_S = 60.0
_ROOT = Path(__file__).parents[2]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "bench", *arguments]
    return await asyncio.create_subprocess_exec(*command, cwd=_ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    try:
        out, err = await asyncio.wait_for(process.communicate(), _END_S)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, out.decode().splitlines(), err.decode()


class _Any(dict[int, Any]):
    """One script for all."""

    def get(self, key: int, default: Any = None) -> Any:
        return answer


async def test_a_run_writes_its_files_and_ends_in_one_line(tmp_path: Path) -> None:
    async with scripted_gateway(_Any()) as gateway:
        load = ("--request-rate", "50", "--num-prompts", "20", "--num-warmups", "3", "--input-len", "5", "--output-len", "4", "--seed", "7")
        judged = ("--goodput", "ttft:2000", "--label", "first", "--output", str(tmp_path), "--note", "quiet machine", "--cores", "decode=0")
        code, lines, err = await ended(await start("run", "--target", gateway.target, *load, *judged))
    run = read_run(tmp_path / "first.json")
    word = {0: "OK", 2: "VOID"}[code]  # a machine that is busy with other things makes it void, and rightly so
    assert lines[-1].startswith(f"{word} bench label=first loop=open requests=20 ok=20 ttft_p50_ms="), (lines, err)
    assert bool(run.void) is (word == "VOID")
    assert "open loop, fixed 5 in 4 out, poisson 50/s, lengths x1, seed 7: 20 requests and 3 of warm-up" in lines[0]
    assert len(run.records) == 23 and all(record.outcome is Outcome.OK for record in run.records)
    assert (run.plan["loop"], run.plan["num_requests"], run.plan["num_warm_up"], run.plan["num_prompt_tokens"]) == ("open", 20, 3, 100)
    assert run.plan["prompt_tokens"]["p99"] == 5 and run.plan["rate_per_s"] > 10 and run.plan["shared_token_ratio"] == 0
    assert run.environment["server"]["version"] == "9.9" and run.environment["notes"] == ["quiet machine"] and run.environment["cores"] == {"decode": "0"}
    assert run.environment["command"].startswith("python -m bench run --target ") and run.cold_start["ttft_s"] > 0
    page = (tmp_path / "first.html").read_text()
    assert "first" in page and "prompt tokens each" in page and "mean 5.000, p50 5.000" in page
    assert all(max(request.token_ids.ids) < 1000 for request in gateway.requests)


async def test_a_closed_loop_over_http_and_a_page_of_both(tmp_path: Path) -> None:
    async with scripted_http() as peer:
        load = ("--max-concurrency", "2", "--num-prompts", "6", "--num-warmups", "0", "--workload", "azure-conv", "--scale", "0.02", "--vocab-size", "1000")
        for label in ("a", "b"):
            command = ("run", "--base-url", peer.url, *load, "--label", label, "--output", str(tmp_path), "--no-report", "--quiet")
            code, lines, err = await ended(await start(*command))
            assert code in (0, 2) and f"label={label} loop=closed requests=6 ok=6" in lines[-1], (lines, err)
    assert not (tmp_path / "a.html").exists()
    assert main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--title", "side by side"]) == 0
    assert "side by side" in (tmp_path / "report.html").read_text()


async def test_ctrl_c_keeps_what_was_measured_and_says_that_it_was_cut(tmp_path: Path) -> None:
    reached = asyncio.Event()

    class Counting(_Any):
        def get(self, key: int, default: Any = None) -> Any:
            return self.script

        async def script(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
            await answer(request, context)
            if len(gateways[0].requests) >= 6:
                reached.set()

    gateways: list[ScriptedGateway] = []
    async with scripted_gateway(Counting()) as gateway:
        gateways.append(gateway)
        load = ("--request-rate", "10", "--num-prompts", "5000", "--num-warmups", "0", "--input-len", "5", "--output-len", "2")
        process = await start("run", "--target", gateway.target, *load, "--label", "cut", "--output", str(tmp_path), "--no-report")
        await asyncio.wait_for(reached.wait(), _END_S)
        process.send_signal(signal.SIGINT)
        code, lines, err = await ended(process)
    assert code == 2 and lines[-1].startswith("VOID bench label=cut"), (lines, err)
    run = read_run(tmp_path / "cut.json")
    assert 3 <= len(run.records) < 5000 and run.void[0].startswith("the run was cut: ")
    assert "Traceback" not in err


async def test_a_sweep_draws_other_arrivals_for_each_probe_and_finds_no_knee_beyond_what_a_server_can_give(tmp_path: Path) -> None:
    """One request at a time, 50 ms each: it cannot give more than 20 a second."""
    place = asyncio.Lock()

    class OnePlace(_Any):
        def get(self, key: int, default: Any = None) -> Any:
            return self.script

        async def script(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
            async with place:
                await answer(request, context, first_s=0.05)

    async with scripted_gateway(OnePlace()) as gateway:
        load = ("--num-prompts", "25", "--duration", "2", "--num-warmups", "0", "--burstiness", "inf", "--input-len", "5", "--output-len", "2")
        search = ("--start-rate", "10", "--min-rate", "5", "--max-rate", "40", "--width", "0.5", "--max-probes", "6", "--goodput", "ttft:150")
        process = await start("sweep", "--target", gateway.target, *load, *search, "--label", "s", "--output", str(tmp_path), "--no-report", "--quiet")
        code, lines, err = await ended(process)
    assert "bench-sweep label=s found=" in lines[-1] and code in (0, 1, 2), (lines, err)
    written = json.loads((tmp_path / "s.sweep.json").read_text())
    assert 1 <= len(written["probes"]) <= 6
    assert (written["knee_per_s"] or 0.0) <= 21.0
    labels = [probe["label"] for probe in written["probes"]]
    seeds = {read_run(tmp_path / f"{label.replace(' ', '_')}.json").plan["seed"] for label in labels}
    assert len(seeds) == len(labels)
    assert main(["report", str(tmp_path / "s.sweep.json"), "--output", str(tmp_path / "s.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("run", "--request-rate", "1", "--target", "127.0.0.1:1"), 1, "tandem 127.0.0.1:1 cannot be loaded: UNAVAILABLE"),
        (("run", "--request-rate", "1", "--base-url", "http://127.0.0.1:1"), 1, "openai http://127.0.0.1:1 cannot be reached"),
        (("run", "--request-rate", "1", "--workload", "nope"), 64, "--workload: there is no workload 'nope'"),
        (("run",), 64, "one of the arguments --request-rate --trace --max-concurrency is required"),
        (("sweep",), 64, "give --goodput once"),
        (("report", "/no/such.json"), 1, "cannot read /no/such.json: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], code: int, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(arguments)) == code
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1
