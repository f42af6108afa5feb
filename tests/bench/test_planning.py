"""From flags, model and server to a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.flags import UsageError, parser
from bench.options import load_options
from bench.plan import Loop
from bench.planning import Planner

_SERVER = {"vocab_size": "5000", "max_model_len": "300"}


def planner(*arguments: str, model_dir: Path | None = None, command: str = "run") -> Planner:
    return Planner(load_options(parser("tandem bench").parse_args([command, *arguments])), model_dir)


def test_a_rate_makes_an_open_loop_with_a_warm_up_ahead() -> None:
    plan = planner("--request-rate", "5", "--num-prompts", "20", "--input-len", "8", "--output-len", "4").plan(_SERVER)
    assert (plan.loop, plan.arrivals, plan.workload) == (Loop.OPEN, "poisson 5/s", "fixed 8 in 4 out")
    assert [request.warm_up for request in plan.requests] == [True] * 10 + [False] * 20
    assert all(len(request.prompt_token_ids) == 8 and max(request.prompt_token_ids) < 5000 for request in plan.requests)


def test_a_concurrency_makes_a_closed_loop_whose_warm_up_fills_it() -> None:
    plan = planner("--max-concurrency", "16", "--num-prompts", "20", "--input-len", "8").plan(_SERVER)
    assert (plan.loop, plan.concurrency, sum(request.warm_up for request in plan.requests), len(plan.requests)) == (Loop.CLOSED, 16, 16, 36)
    with pytest.raises(UsageError, match="with --duration give --num-prompts"):
        planner("--max-concurrency", "16", "--duration", "20").plan(_SERVER)


def test_a_traces_own_times_take_all_of_it_unless_told() -> None:
    some = planner("--workload", "azure-conv", "--scale", "0.01", "--trace", "10", "--duration", "5", "--num-warmups", "0").plan(_SERVER)
    whole = planner("--workload", "azure-conv", "--scale", "0.01", "--trace", "10", "--num-warmups", "0").plan(_SERVER)
    assert some.arrivals == "trace x10" and some.duration_s < 5.0 < whole.duration_s and 0 < len(some.requests) < len(whole.requests)


def test_what_the_model_cannot_take_is_left_out_and_said() -> None:
    plan = planner("--workload", "azure-conv", "--request-rate", "5", "--num-prompts", "20").plan(_SERVER)
    assert all(len(request.prompt_token_ids) + request.max_tokens <= 300 for request in plan.requests) and "left out" in plan.workload


def test_the_vocabulary_is_the_flags_or_the_models_or_the_servers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 600}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": each} for each in range(300, 600)]}))
    given = ("--request-rate", "5", "--num-prompts", "30", "--input-len", "50")

    def highest(*more: str, model_dir: Path | None = None, server: dict[str, str]) -> int:
        plan = planner(*given, *more, model_dir=model_dir).plan(server)
        return max(max(request.prompt_token_ids) for request in plan.requests)

    assert 600 <= highest(server=_SERVER) < 5000
    assert highest(model_dir=tmp_path, server=_SERVER) < 300  # its special tokens are in no prompt
    assert highest("--vocab-size", "700", server=_SERVER) < 700
    with pytest.raises(UsageError, match="give --vocab-size, or --model-dir"):
        highest(server={"model": "m"})
    with pytest.raises(UsageError, match=r"--model-dir: cannot read .*config.json"):
        highest(model_dir=tmp_path / "no", server=_SERVER)


def test_each_probe_of_a_sweep_has_arrivals_of_its_own_and_the_first_the_warm_up() -> None:
    sweep = planner("--input-len", "8", "--duration", "20", command="sweep")
    first, again = sweep.probe(_SERVER, 5.0, 1), sweep.probe(_SERVER, 5.0, 2)
    assert (sum(request.warm_up for request in first.requests), sum(request.warm_up for request in again.requests)) == (10, 0)
    assert first.seed != again.seed and first.requests[0].due_s != again.requests[0].due_s
    assert list(first.requests[0].prompt_token_ids) != list(again.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--request-rate", "5", "--workload", "nope"), "--workload: there is no workload 'nope'"),
        (("--request-rate", "5", "--workload", "azure:/no/such.csv"), "--workload: .*/no/such.csv"),
        (("--trace", "--num-prompts", "5"), "has no times of its own"),
        (("--workload", "azure-conv", "--scale", "0.01", "--trace", "--num-prompts", "5", "--num-warmups", "90000"), "no request behind the 90000"),
        (("--request-rate", "5", "--input-len", "400"), "give a smaller scale"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        planner(*arguments).plan(_SERVER)
