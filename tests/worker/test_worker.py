"""A worker's life: ready once the engine answers, drained when told, dead when its engine is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from decode_svc import __main__ as decode_main
from decode_svc.peers import parse_targets
from decode_svc.settings import DecodeSettings
from engine.async_engine import AsyncEngine
from engine.config import ConfigError, EngineConfig
from engine.errors import CapacityError, EngineDeadError, HoldBrokenError, NoTokenLeftError, SequenceError, SequenceTooLongError
from engine.proto import FieldError
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer import block_copy
from prefill_svc.settings import PrefillSettings
from rpc.errors import StartupError, StatusError
from rpc.service import Service
from rpc.settings import load_settings
from tandem.v1 import decode_pb2, decode_pb2_grpc
from telemetry.metrics import WorkerMetrics
from tests.support.cluster import until
from tests.support.engines import collect, fake_engine, running_fake_engine
from tests.support.fake_device import FakeDevice
from worker.active import ActiveRequests
from worker.probe import EngineProbe
from worker.service import Worker, serve_worker
from worker.statuses import status_of


def _settings() -> DecodeSettings:
    return DecodeSettings(model=Path("fake"), port=0)


async def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    def build(config: EngineConfig) -> AsyncEngine:
        raise AssertionError("nothing may be loaded")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = DecodeSettings(model=Path("fake"), port=taken.getsockname()[1])
        with pytest.raises(StartupError, match=r"--port: cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            await serve_worker(Service("decode", settings), settings, lambda worker: nullcontext(), build)


@pytest.fixture
def _own_registry() -> Any:
    """serve_worker registers with the process's registry: take out what it put there."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@asynccontextmanager
async def _serving(service: Service, settings: DecodeSettings) -> AsyncIterator[tuple[Worker, FakeDevice, asyncio.Task[None], grpc.aio.Channel]]:
    engine, device = fake_engine()
    workers: list[Worker] = []

    @asynccontextmanager
    async def register(worker: Worker) -> AsyncIterator[None]:
        workers.append(worker)
        async with decode_main.register(worker, settings):
            yield

    task = asyncio.create_task(serve_worker(service, settings, register, lambda config: engine))
    await until(lambda: (bool(workers) and worker_is_ready(workers[0])) or task.done())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{workers[0].server.port}") as channel:
        yield workers[0], device, task, channel
    service.stop()
    await asyncio.wait_for(task, 10)


def worker_is_ready(worker: Worker) -> bool:
    return worker.load.report().ready


async def _health(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service="tandem.v1.DecodeService"))
    return int(response.status)


@pytest.mark.usefixtures("_own_registry")
async def test_a_worker_serves_until_it_is_stopped() -> None:
    settings = _settings()
    service = Service("decode", settings)
    async with _serving(service, settings) as (worker, _, task, channel):
        assert await _health(channel) == health_pb2.HealthCheckResponse.SERVING
        report = await decode_pb2_grpc.DecodeServiceStub(channel).GetMemoryReport(decode_pb2.DecodeServiceGetMemoryReportRequest())
        assert report.memory.num_blocks == worker.engine.kv_cache.num_blocks
        service.stop()
        await asyncio.wait_for(task, 10)
    assert service.failure is None
    assert b'tandem_num_blocks{model_name="fake",role="decode",state="free"}' in generate_latest(REGISTRY)


@pytest.mark.usefixtures("_own_registry")
async def test_the_native_copy_is_compiled_before_the_first_pairing_where_and_by_what_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_loaded", [])
    service, settings = Service("decode", _settings()), _settings().model_copy(update={"cache_dir": tmp_path, "compiler": "cc"})
    async with _serving(service, settings):
        assert [name.split("-")[0] for name in os.listdir(tmp_path / "kernels")] == ["block_copy"]


@pytest.mark.usefixtures("_own_registry")
async def test_a_dead_engine_is_the_workers_end() -> None:
    settings = _settings()
    service = Service("decode", settings)
    async with _serving(service, settings) as (worker, device, task, channel):
        device.fail_next = RuntimeError("device lost")
        request = decode_pb2.DecodeServiceGenerateRequest(prompt_token_ids=[1])
        request.sampling_params.max_tokens, request.sampling_params.seed = 4, 0
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(request, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            [message async for message in call]
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not worker_is_ready(worker)
        await asyncio.wait_for(task, 10)
    assert isinstance(service.failure, RuntimeError)


@pytest.mark.parametrize("error", [ConfigError("num_blocks", "is too large"), OSError("no such file")])
async def test_what_a_user_can_cause_is_told_without_a_traceback(error: Exception) -> None:
    def build(config: object) -> AsyncEngine:
        raise error

    settings = _settings()
    with pytest.raises(StartupError, match=r"^--(num-blocks: is too large|model: no such file)$"):
        await serve_worker(Service("decode", settings), settings, lambda worker: decode_main.register(worker, settings), build)


async def test_readiness_asks_the_engine_and_metrics_follow_it() -> None:
    registry = CollectorRegistry()
    told: list[tuple[bool, str]] = []
    async with running_fake_engine() as (engine, device):
        probe = EngineProbe(engine, WorkerMetrics("fake", "decode", registry), lambda ready, reason: told.append((ready, reason)), 5.0, interval_s=0.01)
        async with probe.running():
            assert told == [(True, "")]
            await collect(engine, SequenceSpec("s", tuple(range(100, 130)), SamplingParams(max_tokens=4), SequenceKind.LOCAL))
            await until(lambda: b'tandem_prompt_tokens_computed_total{model_name="fake",role="decode"} 30.0' in generate_latest(registry))
            device.fail_next = RuntimeError("device lost")
            engine.submit(SequenceSpec("t", (1,), SamplingParams(max_tokens=4), SequenceKind.LOCAL))
            await until(lambda: told[-1] == (False, "device lost"))


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (FieldError("a.b", "is wrong"), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (SequenceTooLongError("too long"), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (CapacityError("blocks", 2, 1), "RESOURCE_EXHAUSTED", "NO_KV_BLOCKS"),
        (CapacityError("sequences", 1, 0), "RESOURCE_EXHAUSTED", "NO_SEQUENCE_SLOT"),
        (EngineDeadError("gone"), "UNAVAILABLE", "ENGINE_DEAD"),
        (HoldBrokenError("gone"), "ABORTED", "HOLD_BROKEN"),
        (NoTokenLeftError("the sampling parameters leave no token at position 3"), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (SequenceError("not finite"), "INTERNAL", "INTERNAL"),
        (RuntimeError("secret"), "INTERNAL", "INTERNAL"),
    ],
)
def test_engine_errors_have_their_statuses(error: Exception, code: str, reason: str) -> None:
    status = status_of(error)
    assert (status.code.name, status.reason) == (code, reason)
    assert "secret" not in status.message


def test_requests_in_hand_are_bounded() -> None:
    active = ActiveRequests(1)
    with active.one():
        with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED"), active.one():
            pass
        assert active.num == 1
    with active.one():
        assert active.num == 1


def test_targets_are_a_list_of_names_and_addresses() -> None:
    assert parse_targets(" a=127.0.0.1:1, b=[::1]:65535,") == {"a": "127.0.0.1:1", "b": "[::1]:65535"}
    assert parse_targets("") == {}
    for bad in ("a", "a=", "a=host", "=host:1", "a=host:0", "a=host:65536", "a=host:x", "a=h:1,a=h:2"):
        with pytest.raises(ValueError, match=r"expected|twice"):
            parse_targets(bad)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--prefill", "x"], "--prefill"),
        (["--kv-transports", "inline,pigeon"], "--kv-transports"),
        (["--kv-transports", "inline,inline"], "--kv-transports"),
        (["--kv-transports", ""], "--kv-transports"),
        (["--kv-min-bandwidth", "fast"], "--kv-min-bandwidth"),
        (["--max-kv-bytes-in-flight-total", "0"], "--max-kv-bytes-in-flight-total"),
        (["--block-size", "0"], "--block-size"),
        (["--dtype", "int3"], "--dtype"),
        (["--kv-cache-memory", "4X"], "--kv-cache-memory"),
        (["--kv-cache-memory", "-5"], "--kv-cache-memory"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
    ],
)
def test_bad_settings_name_their_flag(argv: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(DecodeSettings, ["--model", "m", *argv], prog="decode")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-blocks", "1", "--kv-cache-memory", "1GiB"], r"^--num-blocks: give num_blocks or kv_cache_memory, not both"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32", "--max-prefill-tokens-per-step", "32"], r"^--max-num-seqs: 64 sequences do not fit a step"),
        (["--batch-invariant", "--attention-backend", "torch"], r"^--batch-invariant: attention_backend torch sums by the batch"),
    ],
)
def test_an_engine_configuration_that_cannot_work_names_its_flag(argv: list[str], text: str) -> None:
    settings = load_settings(PrefillSettings, ["--model", "m", *argv], prog="prefill")
    with pytest.raises(StartupError, match=text):
        settings.engine_config()


@pytest.mark.parametrize(("given", "num_bytes"), [("512MiB", 512 << 20), ("4GiB", 4 << 30), ("4G", 4 * 10**9), ("1.5gib", 3 << 29), ("1000000", 10**6)])
def test_the_pools_size_may_be_given_in_units(given: str, num_bytes: int) -> None:
    settings = load_settings(DecodeSettings, ["--model", "m", "--kv-cache-memory", given], prog="decode")
    assert settings.engine_config().kv_cache_memory == num_bytes


def test_batch_invariance_is_a_flag_of_both_workers() -> None:
    for cls, prog in ((PrefillSettings, "prefill"), (DecodeSettings, "decode")):
        assert load_settings(cls, ["--model", "m", "--batch-invariant"], prog=prog).engine_config().batch_invariant
        assert not load_settings(cls, ["--model", "m"], prog=prog).engine_config().batch_invariant


def test_every_size_is_a_flag_of_both_workers() -> None:
    values = {
        "num_blocks": 7,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 99,
        "block_size": 32,
        "dtype": "float16",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "max_prefill_tokens_per_step": 66,
    }
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    for cls, prog in ((PrefillSettings, "prefill"), (DecodeSettings, "decode")):
        settings = load_settings(cls, ["--model", "m", "--served-model-name", "name", *argv], prog=prog)
        config = settings.engine_config()
        assert {name: getattr(config, name) for name in values} == values
        assert settings.served_model_name == "name"
