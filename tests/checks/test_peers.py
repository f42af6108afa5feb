"""`make bench-peers`: who is measured when and with what, what the floor is made of, and that servers come up or the run says why, and end."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from bench.openai_target import OpenAITarget
from bench.record import Arrived, Outcome, Record
from checks import peers_servers
from checks.clients_environment import Environment
from checks.handover_bench_report import updated
from checks.peers_cells import CELLS, CONTEXT, EIGHT, MANY, ONE, PROMPT, Cell, Reading, batch_tpot_s, measure, reading
from checks.peers_floor import Limits, Size, floor_of, measured_s
from checks.peers_plot import plot
from checks.peers_report import TARGET, markdown
from checks.peers_results import GRPC, TANDEM, TRANSFORMERS, VLLM, Results, Series
from checks.peers_rounds import phases
from checks.peers_servers import PeerError, VllmPeer, child_command, core_ranges, end_tree
from checks.tiny_models import write_tiny_model

_VOCAB = 49_152
_WAIT_S = 30.0


@pytest.mark.parametrize("with_transformers", [False, True])
@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_every_round_has_each_server_once_and_the_next_one_in_the_opposite_order(num_rounds: int, with_transformers: bool) -> None:
    found = phases(num_rounds, with_transformers=with_transformers)
    visits = [(each, phase.server) for phase in found for each in phase.rounds]
    orders = [[server for of, server in visits if of == each] for each in range(num_rounds)]
    assert Counter(visits) == {(each, server): 1 for each in range(num_rounds) for server in (TANDEM, VLLM, *([TRANSFORMERS] if with_transformers else []))}
    assert [each for each, _ in visits] == sorted(each for each, _ in visits)
    assert all(one == other[::-1] for one, other in itertools.pairwise(orders))
    assert all(one.server != other.server for one, other in itertools.pairwise(found)), "a server is started anew that could have stayed"


def test_no_two_prompts_of_a_run_begin_alike_and_both_servers_get_the_same() -> None:
    plans = [cell.plan(_VOCAB, 100 * each + place) for each in range(2) for place, cell in enumerate(CELLS)]
    begins = [tuple(request.prompt_token_ids[:16]) for plan in plans for request in plan.requests]
    assert len(set(begins)) == len(begins) > 100
    assert ONE.plan(_VOCAB, 7) == ONE.plan(_VOCAB, 7)
    assert {len(request.prompt_token_ids) for request in PROMPT.plan(_VOCAB, 0).requests} == {1024}


def _record(index: int, arrived: list[tuple[float, int]], sent_s: float = 0.0) -> Record:
    told = tuple(Arrived(at_s, count) for at_s, count in arrived)
    total = sum(count for _, count in arrived)
    return Record(index, False, None, sent_s, arrived[-1][0], told, Outcome.OK, num_prompt_tokens=256, max_tokens=total, num_output_tokens=total)


def test_a_batchs_tpot_leaves_out_the_time_in_which_others_prompts_are_computed() -> None:
    early = _record(0, [(1.0, 1), (2.0, 1), (3.0, 1), *((3.0 + 0.1 * step, 1) for step in range(1, 21))])
    late = _record(1, [(3.0, 1), *((3.0 + 0.1 * step, 1) for step in range(1, 31))])
    found = reading([early, late], 0.1)
    assert found.batch_tpot_ms == pytest.approx(100.0)
    assert found.tpot_ms == pytest.approx((4000 / 22 + 100) / 2)
    assert found.ttft_ms == pytest.approx(2000.0)
    assert found.seconds == pytest.approx(6.0)
    assert found.output_tokens_per_s == pytest.approx(54 / 6.0)


def test_messages_of_several_tokens_are_told_by_their_tokens() -> None:
    assert batch_tpot_s([_record(0, [(0.5 * step, 5) for step in range(10)])]) == pytest.approx(0.1)


def test_a_batch_that_never_generates_together_has_no_tpot() -> None:
    one, other = (_record(index, [(start + 0.1 * step, 1) for step in range(20)]) for index, start in enumerate((0.0, 5.0)))
    assert math.isnan(batch_tpot_s([one, other]))


def test_weights_are_counted_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama", dtype=torch.bfloat16)
    size = Size.of(model)
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    matrices = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    assert size.linear_weights == sum(matrices.values())
    assert (size.head_weights, size.weight_bytes) == (embedding, 2 * (embedding + sum(matrices.values())))
    assert size.kv_bytes == 3 * 2 * (2 * 16) * 2


_SIZE = Size(linear_weights=100_000_000, head_weights=20_000_000, kv_bytes=20_000, attention=10_000, vocab_size=_VOCAB)


def test_the_floor_is_what_must_be_read_and_computed() -> None:
    limits = Limits(read_gb_per_s=24.0, matmul_gflop_per_s=1000.0)
    found = floor_of(ONE, _SIZE, limits)
    assert found.step_s == pytest.approx((240e6 + 288 * 20e3) / 24e9)
    assert found.step_bound == "memory"
    operations = 256 * 200e6 + 40e6 + 2 * 10e3 * 256**2
    assert found.prompt_s == pytest.approx(operations / 1e12)
    assert found.cell_s == found.figure_s == pytest.approx(ONE.num_requests * (found.prompt_s + 63 * found.step_s))


def test_a_step_is_bound_by_what_takes_longer() -> None:
    slow = floor_of(MANY, _SIZE, Limits(24.0, 100.0))
    assert slow.step_bound == "compute"
    assert slow.step_s == pytest.approx(32 * (2 * 120e6 + 4 * 10e3 * 288) / 100e9)
    assert slow.cell_s == pytest.approx(64 * slow.prompt_s + 2 * 63 * slow.step_s)


def test_each_figure_is_held_against_its_own_floor() -> None:
    limits = Limits(24.0, 1000.0)
    read = Reading(seconds=9.0, output_tokens_per_s=1.0, ttft_ms=80.0, tpot_ms=70.0, batch_tpot_ms=60.0, generator_cores=0.1)
    assert [measured_s(cell, read) for cell in (MANY, PROMPT, CONTEXT)] == [9.0, 0.08, 0.06]
    floors = [floor_of(cell, _SIZE, limits) for cell in (MANY, PROMPT, CONTEXT)]
    assert [floor.figure_s for floor in floors] == [floors[0].cell_s, floors[1].prompt_s, floors[2].step_s]


def _reading(rate: float) -> Reading:
    return Reading(seconds=100 / rate, output_tokens_per_s=rate, ttft_ms=1000 / rate, tpot_ms=500 / rate, batch_tpot_ms=500 / rate, generator_cores=0.02)


def _results() -> Results:
    """Tandem three times as fast in every round, while the machine itself becomes slower; over gRPC a little faster."""
    results = Results()
    for each in range(5):
        for cell in CELLS:
            results.add(cell, VLLM, _reading(100.0 / (each + 1)))
            results.add(cell, TANDEM, _reading(300.0 / (each + 1)))
        results.add(EIGHT, GRPC, _reading(310.0 / (each + 1)))
        results.transformers.append(50.0 / (each + 1))
    return results


def test_ratios_are_of_pairs_so_that_a_machine_that_slows_down_does_not_count() -> None:
    results = _results()
    assert results.ratios(MANY).values == pytest.approx([3.0] * 5)
    assert results.ratios(PROMPT).values == pytest.approx([1 / 3] * 5)
    assert results.over_transformers().values == pytest.approx([6.0] * 5)


def test_goals_are_met_on_their_own_side() -> None:
    assert (ONE.is_met(2.0), ONE.is_met(1.99)) == (True, False)
    assert (CONTEXT.is_met(0.6), CONTEXT.is_met(0.61)) == (True, False)
    assert [cell.goal for cell in CELLS] == [">= 2", ">= 1.5", ">= 1.2", "<= 1", "<= 0.6"]


def test_a_run_is_told_in_tables_and_in_a_picture(tmp_path: Path) -> None:
    results, limits = _results(), Limits(24.0, 1000.0)
    report = {
        "verdict": "SHORT",
        "quick": False,
        "goals_missed": ["something"],
        "machine": {"num_cores": 2, "memory_gib": 23.5, "kernel": "6.1"},
        "model": "m",
        "rounds": 5,
        "others_share": {"tandem, round 1": 0.02},
        "peers": {VLLM: {"version": "0.32.0", "command": "vllm serve MODEL"}},
        "limits": {name: Series([20.0, 24.0, 25.0]).row() for name in ("read_gb_per_s", "matmul_gflop_per_s")},
        "cells": [results.row(cell, floor_of(cell, _SIZE, limits)) for cell in CELLS],
        "transformers": {"cell": EIGHT.name, "output_tokens_per_s": Series(results.transformers).row(), "ratio": results.over_transformers().row()},
        "over_floor": 1.5,
    }
    report = json.loads(json.dumps(report, allow_nan=False))
    text = markdown(report)
    assert "| 32 streams | output tokens/s | 100.0 (60.0 to 300.0) | 33.3 (20.0 to 100.0) | 3.00 | >= 1.2 |" in text
    assert "8 streams, transformers" in text and "6.00" in text and "missed: something" in text and "`vllm serve MODEL`" in text
    assert updated(f"a\n<!-- {TARGET} -->\nold\n<!-- /{TARGET} -->\nb", text, TARGET).count(text) == 1
    assert plot(report, tmp_path / "out" / "picture.png").stat().st_size > 20_000


def test_cores_are_named_as_ranges() -> None:
    assert core_ranges([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"


async def _lines(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), _WAIT_S)).decode().strip()


async def test_a_process_ends_with_all_below_it_even_those_that_do_not_listen() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    program = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
    process = await asyncio.create_subprocess_exec(*child_command([sys.executable, "-c", program]), stdout=asyncio.subprocess.PIPE, start_new_session=True)
    own, below = map(int, (await _lines(process)).split())
    assert own == process.pid and psutil.pid_exists(below)
    await asyncio.wait_for(end_tree(process), _WAIT_S)
    assert process.returncode is not None
    assert not psutil.pid_exists(below) or psutil.Process(below).status() == psutil.STATUS_ZOMBIE


async def test_a_server_that_does_not_come_up_is_told_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: Environment = replace(peers_servers.VLLM_PEER, folder=tmp_path)
    program = environment.path / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no such device\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(peers_servers, "VLLM_PEER", environment)
    peer = VllmPeer(tmp_path, tmp_path / "log")
    with pytest.raises(PeerError, match=r"ended with 3 before it was ready\n(.|\n)*no such device"):
        await asyncio.wait_for(peer.start(), _WAIT_S)
    await peer.stop()


async def _known_server() -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "checks.bench_server", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    return process, json.loads(await _lines(process))["http"]


async def test_a_cell_is_measured_with_as_many_requests_and_streams_as_it_says() -> None:
    process, url = await _known_server()
    target = OpenAITarget(url)
    try:
        await target.open()
        cell = Cell("some", 4, 32, 5, 8, "output_tokens_per_s", at_least=1.0)
        found = await asyncio.wait_for(measure(cell, target, _VOCAB, 1), _WAIT_S)
        assert process.stdin is not None
        process.stdin.write(b'{"take": true}\n')
        served = json.loads(await _lines(process))
        assert len(served) == 8
        events = sorted([*((one["received_s"], 1) for one in served), *((one["ended_s"], -1) for one in served)])
        assert max(itertools.accumulate(step for _, step in events)) == 4
        assert found.output_tokens_per_s == pytest.approx(8 * 5 / found.seconds, rel=0.05)
        process.stdin.write(b'{"faults": true}\n')
        await _lines(process)
        with pytest.raises(PeerError, match="of 64 requests"):
            await asyncio.wait_for(measure(replace(cell, num_requests=64), target, _VOCAB, 2), _WAIT_S)
    finally:
        await target.close()
        await end_tree(process)


async def test_transformers_program_answers_the_cells_own_prompts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama", vocab_size=1024)
    command = [sys.executable, "-m", "checks.peers_transformers", f"--model={model}", "--threads=1", "--seed=1"]
    process = await asyncio.create_subprocess_exec(
        *child_command(command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 90.0)
    finally:
        await end_tree(process)
    assert process.returncode == 0, errors.decode()[-2000:]
    found = json.loads(output)
    assert found["output_tokens"] == EIGHT.num_requests * EIGHT.output_tokens
    assert found["seconds"] > 0
