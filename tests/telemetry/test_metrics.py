from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from telemetry.metrics import ITL_BUCKETS, GatewayMetrics, RpcMetrics, WorkerMetrics

# What a client writes into a request may never become a label.
CLOSED_LABELS = {
    "model_name", "role", "reason", "finished_reason", "grpc_code", "rpc_method", "transport", "path", "state", "block_size", "num_gpu_blocks", "le",
}  # fmt: skip
GATEWAY_NAMES = {
    "num_requests_waiting", "num_requests_running", "admission_rejections", "requests", "request_queue_time_seconds", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "prompt_tokens", "generation_tokens",
    "prompt_tokens_cached",
}  # fmt: skip
WORKER_NAMES = {
    "request_prefill_time_seconds", "request_decode_time_seconds", "kv_cache_usage_perc", "num_preemptions", "iteration_tokens", "cache_config_info",
    "kv_transfer_time_seconds", "kv_transfer_bytes", "kv_transfer_failures", "prompt_path", "num_blocks", "num_quarantined_readers", "engine_steps",
}  # fmt: skip


def _names(registry: CollectorRegistry) -> set[str]:
    return {family.name.removeprefix("tandem_") for family in registry.collect()}


def _worker(registry: CollectorRegistry) -> WorkerMetrics:
    metrics = WorkerMetrics("smol", "decode", registry)
    metrics.blocks("free").set(7)
    metrics.prompt_path("handover").inc()
    metrics.kv_transfer_bytes("inline").inc(1024)
    metrics.kv_transfer_time_seconds("inline").observe(0.002)
    metrics.kv_transfer_failures("HOLD_BROKEN").inc()
    metrics.set_cache_config(block_size=16, num_blocks=64)
    return metrics


def test_every_promised_metric_exists_with_the_prefix() -> None:
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics("smol", gateway)
    _worker(worker)

    assert _names(gateway) >= GATEWAY_NAMES
    assert _names(worker) >= WORKER_NAMES
    assert all(family.name.startswith("tandem_") for registry in (gateway, worker) for family in registry.collect())


def test_one_process_can_hold_all_metrics_of_a_service_and_labels_are_a_closed_set() -> None:
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    metrics = GatewayMetrics("smol", gateway)
    metrics.requests("stop", "OK").inc()
    metrics.admission_rejections("QUEUE_FULL").inc()
    RpcMetrics(gateway).started("a.B/C")
    _worker(worker)
    RpcMetrics(worker)
    labels = {label for registry in (gateway, worker) for family in registry.collect() for sample in family.samples for label in sample.labels}

    assert labels <= CLOSED_LABELS
    assert gateway.get_sample_value("tandem_requests_total", {"model_name": "smol", "finished_reason": "stop", "grpc_code": "OK"}) == 1


def test_inter_token_latency_sees_below_ten_milliseconds() -> None:
    registry = CollectorRegistry()
    GatewayMetrics("smol", registry).inter_token_latency_seconds.observe(0.002)

    assert ITL_BUCKETS[:4] == (0.001, 0.0025, 0.005, 0.01)
    assert 'tandem_inter_token_latency_seconds_bucket{le="0.0025",model_name="smol"} 1.0' in generate_latest(registry).decode()


def test_total_counter_follows_a_total_and_refuses_to_fall() -> None:
    registry = CollectorRegistry()
    metrics = _worker(registry)
    metrics.engine_steps.advance_to(5)
    metrics.engine_steps.advance_to(12)

    assert registry.get_sample_value("tandem_engine_steps_total", {"model_name": "smol", "role": "decode"}) == 12
    with pytest.raises(ValueError, match="Counters can only be incremented"):
        metrics.engine_steps.advance_to(11)
