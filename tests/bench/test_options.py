"""The flags of `tandem bench`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench.flags import UsageError, parser
from bench.goodput import Limits
from bench.openai_target import Endpoint
from bench.options import limits_of, load_options, output_options, price_of, run_limits, server_options


def parsed(*arguments: str, command: str = "run") -> Namespace:
    when = () if command != "run" or {"--request-rate", "--trace", "--max-concurrency"} & set(arguments) else ("--request-rate", "2")
    return parser("tandem bench").parse_args([command, *arguments, *when])


def test_tandem_is_loaded_over_grpc_unless_a_url_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_GATEWAY", raising=False)
    assert (server_options(parsed()).backend, server_options(parsed()).address) == ("tandem", "127.0.0.1:50051")
    monkeypatch.setenv("TANDEM_GATEWAY", "host:1")
    assert server_options(parsed()).address == "host:1" and server_options(parsed("--target", "other:2")).address == "other:2"
    found = server_options(parsed("--base-url", "http://h:8000"))
    assert (found.backend, found.address, found.endpoint, found.ignore_eos) == ("openai", "http://h:8000", Endpoint.COMPLETIONS, True)
    assert server_options(parsed("--backend", "vllm", "--base-url", "http://h")).backend == "openai"
    assert server_options(parsed("--backend", "openai-chat", "--base-url", "http://h")).endpoint is Endpoint.CHAT


def test_a_key_in_the_environment_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    found = server_options(parsed("--base-url", "http://h", "--header", "X=a=b", "--extra-body", '{"top_k": 1}'))
    assert found.headers == {"Authorization": "Bearer k", "X": "a=b"} and found.extra_body == {"top_k": 1}


def test_one_loop_is_chosen_and_no_second_beside_it() -> None:
    assert load_options(parsed("--max-concurrency", "4")).concurrency == 4
    assert load_options(parsed("--trace")).trace_speed == 1.0 and load_options(parsed("--trace", "2")).trace_speed == 2.0
    with pytest.raises(UsageError, match="not allowed with"):
        parsed("--max-concurrency", "4", "--request-rate", "3")
    with pytest.raises(UsageError, match="required"):
        parser("tandem bench").parse_args(["run"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--request-rate", "0"), "--request-rate: 0 is not above 0"),
        (("--request-rate", "inf"), "--request-rate"),
        (("--num-prompts", "0"), "--num-prompts/-n: 0 is not at least 1|--num-prompts: 0 is not at least 1"),
        (("--numprompts", "3"), "unrecognized arguments: --numprompts"),
        (("--duration", "nan"), "--duration"),
    ],
)
def test_a_flag_that_cannot_be_is_named(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--target", "a:1", "--base-url", "http://h"), "name two servers"),
        (("--backend", "openai"), "needs --base-url"),
        (("--base-url", "h:8000"), "must begin with http"),
        (("--backend", "tandem", "--endpoint", "chat"), "are for OpenAI-compatible servers"),
        (("--base-url", "http://h", "--header", "X"), "--header: 'X' is no NAME=VALUE"),
        (("--base-url", "http://h", "--extra-body", "[1]"), "--extra-body must be a JSON object"),
    ],
)
def test_servers_that_cannot_be_are_refused_in_words(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        server_options(parsed(*arguments))


def test_limits_are_in_milliseconds_as_vllm_has_them() -> None:
    given = parsed("--goodput", "ttft:500", "tpot:50", "--goodput", "e2el:10000")
    assert limits_of(given) == (Limits(ttft_s=0.5, tpot_s=0.05), Limits(e2e_s=10.0))
    for wrong in ("ttft=500", "ttft:x", "itl:5", "ttft:0"):
        with pytest.raises(UsageError, match="--goodput"):
            limits_of(parsed("--goodput", wrong))


def test_the_strictest_limit_on_ttft_says_how_late_the_generator_may_be() -> None:
    given = parsed("--goodput", "ttft:2000", "--goodput", "ttft:1000", "tpot:5", "--request-timeout", "9")
    limits = run_limits(given, limits_of(given))
    assert (limits.ttft_limit_s, limits.request_s, limits.run_s) == (1.0, 9.0, 3600.0)


def test_a_closed_loop_ends_with_its_duration() -> None:
    assert run_limits(parsed("--max-concurrency", "4", "--duration", "30"), ()).run_s == 30.0
    assert run_limits(parsed("--duration", "30"), ()).run_s == 3600.0  # an open loop by its plan


def test_output_and_price() -> None:
    found = output_options(parsed("--output", "here", "--label", "l", "--price", "2.5", "--num-devices", "3", "--cores", "decode=0-3", "--note", "n"))
    assert (found.directory, found.label, found.cores, found.notes, found.report) == (Path("here"), "l", {"decode": "0-3"}, ("n",), True)
    assert found.price is not None and (found.price.per_device_hour, found.price.num_devices) == (2.5, 3)
    with pytest.raises(UsageError, match="--price"):
        price_of(parsed("--price", "-1"))


def test_report_takes_files() -> None:
    given = parsed("a.json", "b.json", "--title", "t", command="report")
    assert given.files == [Path("a.json"), Path("b.json")] and given.title == "t"
