"""A torch device's own thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import AttentionBackendName
from engine.step import Chunk, StepPlan
from tests.support.torch_steps import GREEDY, Driven, tiny_device

CHUNK = Chunk("a", [5] * 40, 0, (1, 2, 3))


class HeldForward:
    """Stands in for what a device computes with; computes when it may, and says where."""

    def __init__(self, forward: object) -> None:
        self._forward = forward
        self.may_compute = threading.Event()
        self.threads: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> object:
        if name == "hidden_states":
            assert self.may_compute.wait(30)
            self.threads.append((threading.current_thread().name, torch.get_num_threads()))
        return getattr(self._forward, name)


@pytest.mark.parametrize(("backend", "num_threads", "of_torch"), [("native", 2, 1), ("torch", 1, 1), ("torch", 2, 2)])
def test_steps_run_behind_the_caller_on_one_thread_and_torch_has_the_configured_number_where_it_computes(
    tiny_llama: Path, kernel_cache: Path, backend: AttentionBackendName, num_threads: int, of_torch: int
) -> None:
    before = torch.get_num_threads()
    device = tiny_device(tiny_llama, kernel_cache, backend=backend, num_threads=num_threads)
    held = HeldForward(device._forward)
    device._forward = held  # type: ignore[assignment]
    try:
        first = device.launch(StepPlan(0, [CHUNK]))
        assert not first.done()
        held.may_compute.set()
        assert first.result(30).failed == {}
        device.launch(StepPlan(1, [CHUNK])).result(30)
        assert held.threads[0] == held.threads[1]
        name, threads_there = held.threads[0]
        assert name != threading.current_thread().name
        assert threads_there == of_torch
    finally:
        held.may_compute.set()
        device.close()
        torch.set_num_threads(before)


def test_close_waits_for_the_step_in_flight_and_no_step_starts_behind_it(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    held = HeldForward(device._forward)
    device._forward = held  # type: ignore[assignment]
    step = device.launch(StepPlan(0, [CHUNK]))
    closing = threading.Thread(target=device.close)
    closing.start()
    assert not step.done()
    held.may_compute.set()
    closing.join(30)
    assert step.done() and step.result().failed == {}
    device.close()
    with pytest.raises(RuntimeError):
        device.launch(StepPlan(1, [CHUNK]))


def test_a_broken_plan_raises_through_its_future_and_the_next_step_runs(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    broken = device.launch(StepPlan(0, [CHUNK], copies=[(0, 4096)]))
    assert isinstance(broken.exception(30), IndexError)
    assert device.launch(StepPlan(1, [CHUNK])).result(30).failed == {}


def test_samples_of_one_prompt_are_drawn_as_if_each_were_asked_for_alone(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    params = replace(GREEDY, temperature=1.5, n=4, seed=3, logprobs=2, repetition_penalty=1.2)
    asked = Driven("one", [7, 8, 9] * 9, (1, 2)).chunk(27)
    rows = tuple(replace(asked.samples[0], params=params.of_sample(index)) for index in range(4))
    beside = Driven("beside", [4] * 20, (3, 4)).chunk(20)
    together = device.launch(StepPlan(0, [beside, replace(asked, samples=rows)])).result()
    alone = [device.launch(StepPlan(0, [replace(asked, samples=(row,))])).result().sampled[0][0] for row in rows]
    assert list(together.sampled[1]) == alone
    assert len(together.sampled[0]) == 1
    assert len({token.token_id for token in alone}) > 1
