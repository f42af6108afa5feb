"""Any server that speaks OpenAI's HTTP API: vLLM, SGLang, TensorRT-LLM, llama.cpp, and Tandem's own HTTP door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import aiohttp

from bench.metrics_page import sample_of
from bench.openai_chunk import REFUSED_STATUSES, error_text, take_chunk
from bench.plan import PlannedRequest
from bench.record import Outcome, one_line
from bench.run import Sample
from bench.sse import SseError, SseParser
from bench.target import Clock, Exchange, TargetError

_DONE: Final = b"[DONE]"
_ASK: Final = aiohttp.ClientTimeout(total=5.0)
_OPEN: Final = aiohttp.ClientTimeout(total=10.0)
_UNBOUNDED: Final = aiohttp.ClientTimeout(total=None, sock_connect=None)
"""The runner has the limits, the same for every kind of server."""
_KEEP_ALIVE_S: Final = 4.0
"""Below the five seconds after which uvicorn closes an idle connection: a request that meets the close would fail for no fault of the server's."""
_MAX_ERROR_BYTES: Final = 4096

Detokenize = Callable[[Sequence[int]], str]


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """How a server is asked."""

    model: str = ""
    """Needed only where several are served, or where the server lists none."""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    detokenize: Detokenize | None = None
    """Prompts go out as text. Needed for chat; without it a completion's prompt is its token ids."""
    ignore_eos: bool = True
    """Send ignore_eos, min_tokens and skip_special_tokens, which are no fields of OpenAI's own. Without them an answer that ends by itself is WRONG."""
    continuous_usage: bool = True
    """Ask for the usage with every chunk, which says how many tokens are in it. A server that does not know the field ignores it or refuses it."""
    temperature: float = 0.0
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, over all others."""


class OpenAITarget:
    """`base_url` with or without /v1."""

    def __init__(self, base_url: str, options: OpenAIOptions | None = None) -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        self._options = options or OpenAIOptions()
        self.name = f"openai {self._url}"
        self._path = "/v1/chat/completions" if self._options.endpoint is Endpoint.CHAT else "/v1/completions"
        self._model = self._options.model
        self._session: aiohttp.ClientSession | None = None
        self._tells_metrics = True
        self._max_model_len = ""
        if self._options.endpoint is Endpoint.CHAT and self._options.detokenize is None:
            raise TargetError("chat takes text: a tokenizer is needed to make it of the plan's tokens")

    async def open(self) -> None:
        """Raises TargetError when nothing answers, or when it is not known which model to ask for."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=None)
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **self._options.headers}
        # No cookies: that of a load balancer would send all requests to the replica of the first one.
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=_UNBOUNDED, cookie_jar=aiohttp.DummyCookieJar())
        try:
            async with self._session.get(f"{self._url}/v1/models", timeout=_OPEN) as response:
                self._choose_model(await _json(response), response.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TargetError(f"{self.name} cannot be reached: {str(error) or type(error).__name__}") from None

    def _choose_model(self, answer: Any, status: int) -> None:
        if status in (401, 403):
            raise TargetError(f"{self.name} asks for a key (HTTP {status}): set OPENAI_API_KEY")
        listed = answer.get("data") if isinstance(answer, dict) else None
        models = [model for model in listed or () if isinstance(model, dict) and "id" in model]
        served = [str(model["id"]) for model in models]
        if not self._model and len(served) != 1:
            raise TargetError(f"{self.name} lists {', '.join(served) or 'no models'}: name one with --model")
        if self._model and served and self._model not in served:
            raise TargetError(f"{self.name} does not serve model {self._model!r}, but {', '.join(served)}")
        self._model = self._model or served[0]
        self._max_model_len = next((str(model["max_model_len"]) for model in models if model["id"] == self._model and model.get("max_model_len")), "")

    def encode(self, request: PlannedRequest) -> bytes:
        """The JSON body."""
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if options.continuous_usage else {})},
            "temperature": options.temperature,
            "seed": options.seed + max(request.index, 0),
            "max_tokens": request.max_tokens,
        }
        if options.ignore_eos:
            # Special tokens stay in the text, so that no token is without one: an answer without text is WRONG.
            body |= {"ignore_eos": True, "min_tokens": request.max_tokens, "skip_special_tokens": False}
        if options.endpoint is Endpoint.CHAT:
            assert options.detokenize is not None
            body["messages"] = [{"role": "user", "content": options.detokenize(request.prompt_token_ids)}]
        else:
            body["prompt"] = list(map(int, request.prompt_token_ids)) if options.detokenize is None else options.detokenize(request.prompt_token_ids)
        return json.dumps(body | dict(options.extra_body), separators=(",", ":")).encode()

    async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
        """Connecting is part of the answer's time: a server that is slow to accept is slow."""
        assert self._session is not None
        exchange.sent_s = clock()
        try:
            async with self._session.post(self._url + self._path, data=body) as response:
                if response.status == 200 and response.content_type != "application/json":
                    await _take_stream(response, clock, exchange)
                else:
                    await _take_status(response, exchange)
        except (aiohttp.ClientError, OSError, SseError) as error:
            if exchange.ended_s is None:
                exchange.outcome, exchange.error = Outcome.FAILED, one_line(f"{type(error).__name__}: {error}")
        if exchange.ended_s is None:
            exchange.ended_s = clock()
        if self._options.endpoint is Endpoint.COMPLETIONS and self._options.detokenize is None:
            exchange.num_prompt_tokens = None  # as sent

    async def sample(self, clock: Clock) -> Sample | None:
        """By /metrics; a server without it is not asked again."""
        if not self._tells_metrics or self._session is None:
            return None
        try:
            async with self._session.get(f"{self._url}/metrics", timeout=_ASK) as response:
                self._tells_metrics = response.status != 404
                return sample_of(await response.read(), clock()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def describe(self) -> dict[str, str]:
        """Version by /version, and the Server header."""
        assert self._session is not None
        found = {"model": self._model, **({"max_model_len": self._max_model_len} if self._max_model_len else {})}
        try:
            async with self._session.get(f"{self._url}/version", timeout=_ASK) as response:
                answer = await _json(response)
                found["server"] = response.headers.get("Server", "")
                found["version"] = str(answer.get("version", "unknown")) if isinstance(answer, dict) and response.status == 200 else "unknown"
        except (aiohttp.ClientError, OSError, TimeoutError):
            found["version"] = "unknown"
        return {name: one_line(value) for name, value in found.items()}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # its transports close in the loop's next turn


async def _take_stream(response: aiohttp.ClientResponse, clock: Clock, exchange: Exchange) -> None:
    parser = SseParser()
    async for piece in response.content.iter_any():
        at_s = clock()
        for data in parser.feed(piece):
            if exchange.ended_s is not None:
                continue  # such as the [DONE] behind an error; read to the end of the body, so that the connection can be used again
            if data == _DONE:
                exchange.ended_s, exchange.outcome = at_s, Outcome.OK
            elif take_chunk(data, at_s, exchange):
                exchange.ended_s = at_s
    if exchange.ended_s is None:
        raise SseError("the stream ended without [DONE]" + ("" if parser.is_between_events else ", in the middle of an event"))


async def _take_status(response: aiohttp.ClientResponse, exchange: Exchange) -> None:
    raw = await response.content.read(_MAX_ERROR_BYTES)
    if response.status == 200:
        exchange.outcome, exchange.error = Outcome.FAILED, "it answered whole, in JSON, where a stream was asked for"
        return
    exchange.outcome = Outcome.REFUSED if response.status in REFUSED_STATUSES else Outcome.FAILED
    try:
        answer = json.loads(raw)
        text = error_text(answer.get("error", answer) if isinstance(answer, dict) else answer)
    except ValueError:
        text = one_line(raw.decode(errors="replace")) or one_line(response.reason or "")
    exchange.error = f"HTTP {response.status}: {text}"


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return await response.json(content_type=None)
    except ValueError:
        return None
