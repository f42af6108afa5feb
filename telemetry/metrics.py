"""Every Prometheus metric: `tandem_` and vLLM's suffix where vLLM has the same metric, with vLLM's buckets, so that its dashboards compare.

Labels are `model_name`, `role`, and closed sets; none takes a value that a client can invent. The scraper adds `instance`.
"""

from __future__ import annotations

import contextlib
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TPOT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
# vLLM's are too coarse for small models: below 10 ms they see nothing.
ITL_BUCKETS: Final = (0.001, 0.0025, 0.005, *TPOT_BUCKETS)
REQUEST_BUCKETS: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
KV_TRANSFER_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
STEP_TOKENS_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RPC_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class TotalCounter:
    """A counter fed with totals that somebody else counts, such as the engine's number of steps."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._total = 0.0

    def advance_to(self, total: float) -> None:
        """Raises the counter to `total`; a smaller total than before raises ValueError."""
        self._counter.inc(total - self._total)
        self._total = total


class RpcMetrics:
    """What the server interceptor counts. `method` is a registered method, never what a client asked for."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._calls = Counter("tandem_rpc_server_calls", "RPCs that ended, by status.", ["rpc_method", "grpc_code"], registry=registry)
        self._active = Gauge("tandem_rpc_server_active", "RPCs whose handlers have not ended.", ["rpc_method"], registry=registry)
        self._duration = Histogram("tandem_rpc_server_call_duration_seconds", "Duration of RPCs.", ["rpc_method"], buckets=RPC_BUCKETS, registry=registry)

    def started(self, method: str) -> None:
        """A handler begins."""
        self._active.labels(method).inc()

    def ended(self, method: str, grpc_code: str, duration_s: float) -> None:
        """A handler has ended; `grpc_code` is a name such as OK."""
        self._active.labels(method).dec()
        self._calls.labels(method, grpc_code).inc()
        self._duration.labels(method).observe(duration_s)


class HttpMetrics:
    """What the HTTP door counts. `route` is one that is served, or "other"; `code` is the answer's, or what a stream came to behind its first event."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._requests = Counter("tandem_http_server_requests", "HTTP requests that ended, by status.", ["http_route", "http_code"], registry=registry)
        self._active = Gauge("tandem_http_server_active", "HTTP requests that have not ended.", ["http_route"], registry=registry)
        self._duration = Histogram(
            "tandem_http_server_request_duration_seconds", "Duration of HTTP requests.", ["http_route"], buckets=RPC_BUCKETS, registry=registry
        )

    def started(self, route: str) -> None:
        """A request's headers are there."""
        self._active.labels(route).inc()

    def ended(self, route: str, code: int, duration_s: float) -> None:
        """Its answer was handed to the transport, or its client has left (499)."""
        self._active.labels(route).dec()
        self._requests.labels(route, str(code)).inc()
        self._duration.labels(route).observe(duration_s)


class GatewayMetrics:
    """The gateway's metrics, bound to one model. Attributes are ready to inc, set or observe; methods take the remaining labels."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model_name = model_name

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tandem_{name}", text, ["model_name"], registry=registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"tandem_{name}", text, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_{name}", text, ["model_name"], buckets=buckets, registry=registry).labels(model_name)

        self.num_requests_waiting = gauge("num_requests_waiting", "Requests in the gateway's queue.")
        self.num_requests_running = gauge("num_requests_running", "Requests admitted and not yet ended.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = counter("generation_tokens", "Tokens sent to clients.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens whose KV came from a prefix cache.")
        self.request_queue_time_seconds = histogram("request_queue_time_seconds", "Time in the queue.", REQUEST_BUCKETS)
        self.time_to_first_token_seconds = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self.inter_token_latency_seconds = histogram("inter_token_latency_seconds", "Gap between two tokens of a request.", ITL_BUCKETS)
        self.request_time_per_output_token_seconds = histogram("request_time_per_output_token_seconds", "A request's mean gap.", ITL_BUCKETS)
        self.e2e_request_latency_seconds = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS)
        self._admission_rejections = Counter("tandem_admission_rejections", "Requests refused by admission.", ["model_name", "reason"], registry=registry)
        self._requests = Counter("tandem_requests", "Requests that ended.", ["model_name", "finished_reason", "grpc_code"], registry=registry)

    def admission_rejections(self, reason: str) -> Counter:
        """Refusals for a reason of the status table, such as QUEUE_FULL."""
        return self._admission_rejections.labels(self._model_name, reason)

    def requests(self, finished_reason: str, grpc_code: str) -> Counter:
        """Ended requests; `finished_reason` is stop, length, abort or error."""
        return self._requests.labels(self._model_name, finished_reason, grpc_code)


class WorkerMetrics:
    """Metrics of a prefill or decode worker, bound to its model and role."""

    def __init__(self, model_name: str, role: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._bound = (model_name, role)
        self._registry = registry
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences waiting in the engine.")
        self.num_requests_running = self._gauge("num_requests_running", "Sequences being computed.")
        self.num_requests_in_handover = self._gauge("num_requests_in_handover", "Sequences whose KV is on its way or held for a reader.")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "Part of the pool's blocks that is held, 0 to 1.")
        self.num_quarantined_readers = self._gauge("num_quarantined_readers", "Readers that did not end in time and keep their blocks. Alarm above 0.")
        self.prompt_tokens_computed = TotalCounter(self._counter("prompt_tokens_computed", "Prompt tokens computed."))
        self.engine_steps = TotalCounter(self._counter("engine_steps", "Engine steps run."))
        self.engine_late_steps = TotalCounter(self._counter("engine_late_steps", "Steps that computed a sequence after its release was posted."))
        self.num_preemptions = self._counter("num_preemptions", "Sequences that gave their blocks back to go on later.")
        self.request_prefill_time_seconds = self._histogram("request_prefill_time_seconds", "First chunk to first token.", REQUEST_BUCKETS)
        self.request_decode_time_seconds = self._histogram("request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS)
        self.iteration_tokens = self._histogram("iteration_tokens", "Tokens computed in one step.", STEP_TOKENS_BUCKETS)
        self._blocks = Gauge("tandem_num_blocks", "Blocks of the pool by state.", ["model_name", "role", "state"], registry=registry)
        self._prompt_path = self._counter_by("path", "prompt_path", "Prompts by who computed them.")
        self._kv_bytes = self._counter_by("transport", "kv_transfer_bytes", "KV bytes copied.")
        self._kv_failures = self._counter_by("reason", "kv_transfer_failures", "Hand-overs that were thrown away.")
        self._kv_time = self._histogram_by("transport", "kv_transfer_time_seconds", "Time in which a hand-over's bytes were on their way.")
        self._kv_hidden = self._histogram_by("transport", "kv_transfer_hidden_time_seconds", "Of this, the time before the prompt was computed.")
        self._kv_path = Gauge(
            "tandem_kv_path_bytes_per_second",
            "What the probe of the path from a prefill instance moved; there is none while the two are not paired.",
            ["model_name", "role", "prefill_instance", "transport"],
            registry=registry,
        )
        self._kv_path_changes = self._counter_by(
            "prefill_instance", "kv_path_changes", "Times that the path from a prefill instance became another one, or none."
        )
        self._cache_config = Gauge(
            "tandem_cache_config_info", "The KV cache's shape.", ["model_name", "role", "block_size", "num_gpu_blocks"], registry=registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tandem_{name}", text, ["model_name", "role"], registry=self._registry).labels(*self._bound)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tandem_{name}", text, ["model_name", "role"], registry=self._registry).labels(*self._bound)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tandem_{name}", text, ["model_name", "role"], buckets=buckets, registry=self._registry).labels(*self._bound)

    def _counter_by(self, label: str, name: str, text: str) -> Counter:
        return Counter(f"tandem_{name}", text, ["model_name", "role", label], registry=self._registry)

    def _histogram_by(self, label: str, name: str, text: str) -> Histogram:
        return Histogram(f"tandem_{name}", text, ["model_name", "role", label], buckets=KV_TRANSFER_BUCKETS, registry=self._registry)

    def blocks(self, state: str) -> Gauge:
        """Blocks in a state: free, cached or held."""
        return self._blocks.labels(*self._bound, state)

    def prompt_path(self, path: str) -> Counter:
        """Prompts computed by handover, local, local_fallback or prefill_only."""
        return self._prompt_path.labels(*self._bound, path)

    def kv_transfer_bytes(self, transport: str) -> Counter:
        """Bytes copied by a transport."""
        return self._kv_bytes.labels(*self._bound, transport)

    def kv_transfer_time_seconds(self, transport: str) -> Histogram:
        """Wire time of hand-overs by a transport."""
        return self._kv_time.labels(*self._bound, transport)

    def kv_transfer_hidden_time_seconds(self, transport: str) -> Histogram:
        """The part of the wire time that was hidden behind compute."""
        return self._kv_hidden.labels(*self._bound, transport)

    def set_kv_path(self, prefill_instance: str, transport: str, bytes_per_s: float) -> None:
        """The path from an instance, by its configured name."""
        self._kv_path.labels(*self._bound, prefill_instance, transport).set(bytes_per_s)

    def remove_kv_path(self, prefill_instance: str, transport: str) -> None:
        """That path is not taken any more."""
        with contextlib.suppress(KeyError):
            self._kv_path.remove(*self._bound, prefill_instance, transport)

    def kv_path_changes(self, prefill_instance: str) -> Counter:
        """Changes of the path from an instance, by its configured name."""
        return self._kv_path_changes.labels(*self._bound, prefill_instance)

    def kv_transfer_failures(self, reason: str) -> Counter:
        """Hand-overs thrown away, by a reason of the code, never a text from a peer."""
        return self._kv_failures.labels(*self._bound, reason)

    def set_cache_config(self, *, block_size: int, num_blocks: int) -> None:
        """States the pool's shape once; named num_gpu_blocks as the endpoint picker of Kubernetes reads it."""
        self._cache_config.labels(*self._bound, str(block_size), str(num_blocks)).set(1)
