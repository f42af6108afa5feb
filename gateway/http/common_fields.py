"""Fields that completions and chat share beside the sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.http.json_body import Body, shown

_INT32 = (1 << 31) - 1
_NOT_SERVED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "kv_transfer_params",
    "cache_salt",
    "stream_interval",
    "prompt_cache_key",
)


@dataclass(frozen=True, slots=True)
class Common:
    """How to answer, and to whom."""

    model: str
    request_id: str
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def read_common(body: Body, request_id: str) -> Common:
    """Takes them; refuses those that are not served. Raises StatusError."""
    body.text("user")  # whom the client asks for: it says nothing about the answer
    body.text("safety_identifier")
    for name in _NOT_SERVED:
        body.only(name)
    body.only("service_tier", "auto", "default")
    body.only("store", False)
    body.only("metadata", {})
    _only_text(body)
    stream = bool(body.flag("stream"))
    include_usage, continuous_usage = _stream_options(body, stream)
    return Common(
        model=body.text("model") or "",
        request_id=body.text("request_id") or request_id,
        priority=body.integer("priority", -_INT32, _INT32) or 0,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(body.flag("return_token_ids")),
    )


def _only_text(body: Body) -> None:
    wanted = body.child("response_format")
    if wanted is None:
        return
    if (kind := wanted.text("type")) != "text":
        raise wanted.wrong("type", f"must be text, is {shown(kind)}: structured output is not supported")
    wanted.end()


def _stream_options(body: Body, stream: bool) -> tuple[bool, bool]:
    options = body.child("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise body.wrong("stream_options", "may only be given with stream")
    found = bool(options.flag("include_usage")), bool(options.flag("continuous_usage_stats"))
    options.only("include_obfuscation", False)
    options.end()
    return found


MAX_PROMPTS = 128
"""Of one body; they run side by side."""
