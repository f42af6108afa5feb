"""What one message of an OpenAI-compatible stream adds to an exchange."""

from __future__ import annotations

import json
from typing import Any

from bench.record import Outcome, one_line
from bench.sse import SseError
from bench.target import Exchange

REFUSED_STATUSES = (429, 503)
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


def take_chunk(data: bytes, at_s: float, exchange: Exchange) -> bool:
    """Notes the data of one event; True: it was an error, and the exchange says which. Raises SseError for what is no chunk.

    Tokens are counted by the usage that comes along with each chunk, and where a server gives none, as one for each chunk with text.
    """
    try:
        chunk = json.loads(data)
        error = chunk if chunk.get("object") == "error" else chunk.get("error")  # vLLM once had the error's fields side by side with its kind
        if error is not None:
            _take_error(error, exchange)
            return True
        choices, usage = chunk.get("choices") or (), chunk.get("usage")
        completion_tokens = None if usage is None else int(usage["completion_tokens"])
        if choices:
            _take_choice(choices[0], at_s, exchange, completion_tokens)
        if usage is not None:
            exchange.num_output_tokens = completion_tokens
            exchange.num_prompt_tokens = None if usage.get("prompt_tokens") is None else int(usage["prompt_tokens"])
            exchange.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as problem:
        raise SseError(f"no chunk of a completion ({type(problem).__name__}: {problem}): {data[:200].decode(errors='replace')}") from None
    return False


def _take_choice(choice: dict[str, Any], at_s: float, exchange: Exchange, completion_tokens: int | None) -> None:
    text = choice.get("text")
    if text is None:
        delta = choice.get("delta") or {}
        text = "".join(delta.get(name) or "" for name in _TEXT_FIELDS)
    if text:
        exchange.has_text = True
    if not exchange.arrived and (text or completion_tokens):
        # Decided by the first chunk with tokens: some servers put the usage of the whole on the last chunk with a choice, and zeros on those before it.
        exchange.counted_by = "usage" if completion_tokens is not None and completion_tokens > 0 else "messages"
    if exchange.counted_by == "messages":
        num_tokens = 1 if text else 0
    else:
        num_tokens = (completion_tokens or 0) - exchange.num_arrived_tokens
    if num_tokens > 0:
        exchange.take(at_s, num_tokens)
    if choice.get("finish_reason"):
        exchange.finish_reason = str(choice["finish_reason"])


def _take_error(error: Any, exchange: Exchange) -> None:
    code = error.get("code") if isinstance(error, dict) else None
    refused = not exchange.arrived and str(code) in {str(status) for status in REFUSED_STATUSES}
    exchange.outcome = Outcome.REFUSED if refused else Outcome.FAILED
    exchange.error = f"error in the stream: {error_text(error)}"


def error_text(error: Any) -> str:
    """The error object of a body or an event in one line."""
    if isinstance(error, dict):
        parts = [str(error[name]) for name in ("code", "type", "message") if error.get(name) not in (None, "")]
        return one_line(" ".join(parts)) or "no reason given"
    return one_line(str(error))
