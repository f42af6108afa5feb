"""A server's state by its Prometheus page."""

from __future__ import annotations

import re

from bench.run import Sample

_GAUGE = re.compile(
    rb"^(?:vllm:|tandem_|sglang:|trtllm_)(num_requests_running|num_running_reqs|num_requests_waiting|num_queue_reqs"
    rb"|kv_cache_usage_perc|gpu_cache_usage_perc|token_usage|kv_cache_utilization)(?:\{[^\n]*\})? ([^ \n]+)",
    re.MULTILINE,
)
_RUNNING = (b"num_requests_running", b"num_running_reqs")
_WAITING = (b"num_requests_waiting", b"num_queue_reqs")


def sample_of(page: bytes, at_s: float) -> Sample | None:
    """Running and waiting summed over all labels, KV usage of the fullest. None: the page tells of no requests."""
    running = waiting = 0.0
    usages: list[float] = []
    found = False
    for name, text in _GAUGE.findall(page):
        value = float(text)
        if name in _RUNNING:
            running, found = running + value, True
        elif name in _WAITING:
            waiting, found = waiting + value, True
        else:
            usages.append(value)
    return Sample(at_s, int(running), int(waiting), max(usages, default=None)) if found else None
