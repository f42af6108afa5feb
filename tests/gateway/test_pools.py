from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.instances import Role
from gateway.limits import AdmissionLimits
from gateway.pools import Peer
from gateway.served_model import ServedModel
from gateway.settings import GatewaySettings
from rpc.settings import load_settings
from tests.gateway.fake_decode import FakeDecode, load_report, tokens
from tests.gateway.house import ask, house


@pytest.fixture
def model(models: dict[str, ServedModel]) -> ServedModel:
    return models["smollm2"]


async def test_a_restarted_worker_is_found_again(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h:
        port = h.decodes[0].server.port
        await h.decodes[0].server._server.stop(None)
        await h.until(lambda: not h.gateway.pools.instances["d0"].available)
        assert h.gateway.server.not_ready_reason == "no decode instance is available"
        reborn = FakeDecode(load_report(model.vocab_size, sorted(model.eos_token_ids), incarnation="2"), tokens([6]))
        reborn.server.port = port
        await reborn.server.start()
        h.decodes[0] = reborn
        await h.until(lambda: h.gateway.pools.instances["d0"].available)
        messages, _ = await h.generate(ask("x"))
        assert list(messages[0].token_ids) == [6]
        await reborn.server.drain(0.01)


async def test_a_worker_whose_reports_have_stopped_goes_on_serving(model: ServedModel) -> None:
    """No report for long is no sign of a full pool: reports come on change, and the stream itself tells that the worker lives."""
    async with house(model, tokens([5]), num_blocks=20, num_free_blocks=20) as h:
        for _ in range(30):
            await h.generate(ask("x"))
        assert len(h.decodes[0].requests) == 30


async def test_a_report_lets_waiting_requests_in(model: ServedModel) -> None:
    async with house(model, tokens([5]), num_blocks=20, num_free_blocks=0) as h:
        waiting = asyncio.create_task(h.generate(ask("x")))
        await h.until(lambda: h.gateway.admission.num_waiting == 1)
        h.decodes[0].load.change(num_free_blocks=20)
        await waiting


async def test_a_worker_that_answers_with_no_load_report_is_watched_on(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(model, tokens([5])) as h:
        instance = h.gateway.pools.instances["d0"]
        with monkeypatch.context() as broken:
            broken.setattr(h.gateway.ledger, "report", lambda *_, **__: 1 / 0)
            h.decodes[0].load.change(num_free_blocks=900)
            await h.until(lambda: not instance.available)
            assert instance.reason == "its load report cannot be used: ZeroDivisionError"
        await h.until(lambda: instance.available)
        await h.generate(ask("x"))


def test_settings_give_peers_and_limits(tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tmp_path),
        "--decode",
        "d0=127.0.0.1:1, d1=h:2",
        "--prefill",
        "p0=[::1]:3",
        "--max-queue-requests",
        "7",
        "--max-queue-time-s",
        "1.5",
    ]
    settings = load_settings(GatewaySettings, arguments)
    assert settings.peers() == [Peer("d0", "127.0.0.1:1", Role.DECODE), Peer("d1", "h:2", Role.DECODE), Peer("p0", "[::1]:3", Role.PREFILL)]
    assert settings.admission_limits() == AdmissionLimits(max_queue_requests=7, max_queue_time_s=1.5)
    assert AdmissionLimits() == load_settings(GatewaySettings, ["--model", "m", "--decode", "d0=h:1"]).admission_limits(), "the defaults stand in one place"


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_DECODE", "d0=h:1")
    monkeypatch.setenv("TANDEM_PREFILL", "p0=h:2")
    assert [peer.name for peer in load_settings(GatewaySettings, ["--model", "m"]).peers()] == ["d0", "p0"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--decode", "d0=h:1"], "--model"),
        (["--model", "m"], "--decode"),
        (["--model", "m", "--decode", "h:1"], "name=host:port"),
        (["--model", "m", "--decode", "d0=h:65536"], "port"),
        (["--model", "m", "--decode", "d0=h:0"], "port"),
        (["--model", "m", "--decode", "d0=h:1", "--prefill", "d0=h:2"], "a name twice: d0"),
        (["--model", "m", "--decode", "d0=h:1", "--max-queue-time-s", "0"], "--max-queue-time-s"),
    ],
)
def test_settings_are_refused_by_their_flag(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(GatewaySettings, arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
