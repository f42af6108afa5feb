"""Whether an answer that ended well is what was asked for."""

from __future__ import annotations

from bench.plan import PlannedRequest
from bench.target import Exchange


def what_is_wrong(request: PlannedRequest, exchange: Exchange) -> str:
    """In one line; empty: nothing. Of a server that gives no usage, several tokens may be in a message, and only too many of them are wrong."""
    wanted, usage, arrived = request.max_tokens, exchange.num_output_tokens, exchange.num_arrived_tokens
    if usage is not None and usage != wanted:
        return f"usage says {usage} tokens instead of {wanted}"
    if usage is None and arrived > wanted:
        return f"{arrived} messages with text instead of {wanted} tokens, and no usage"
    if exchange.counted_by == "usage" and arrived != wanted:
        return f"{arrived} tokens arrived instead of {wanted}"
    if exchange.finish_reason != "length":
        return f"finish reason {exchange.finish_reason or 'missing'} instead of length"
    if not exchange.has_text:
        return "no text"
    return ""
