"""The routes that generate nothing: models, health, metrics, version, and the tokenizer's two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from starlette.types import Receive, Scope, Send

from gateway.http.body_reader import BodyReader, check_content_type
from gateway.http.errors import HttpError
from gateway.http.exchange import Exchange, exchange_of
from gateway.http.json_body import Body, read_body
from gateway.limits import RequestLimits
from gateway.pools import Pools
from gateway.prompt import prompt_token_ids
from gateway.sampling_checks import token_ids_problem
from gateway.served_model import ServedModel
from gateway.status import package_version
from gateway.validation import check_request
from rpc.errors import not_found
from tandem.v1 import gateway_pb2

_CHARS_PER_TOKEN = 20
"""Decoding one token takes as long as encoding about this many characters."""


@dataclass(frozen=True, slots=True)
class Page:
    """A route as an ASGI application."""

    answer: Callable[[Exchange], Awaitable[None]]
    max_time_s: float
    """Until the answer is handed to the transport, which has no room while the client takes nothing of the one before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        try:
            async with asyncio.timeout(self.max_time_s):
                await self.answer(exchange_of(scope))
        except TimeoutError:
            raise HttpError(504, f"no answer within {self.max_time_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Pages:
    """What they tell of."""

    model: ServedModel
    pools: Pools
    registry: CollectorRegistry
    ready: Callable[[], bool]
    _created: int = field(default_factory=lambda: int(time.time()))

    async def models(self, exchange: Exchange) -> None:
        """OpenAI's list, with vLLM's max_model_len and root."""
        model = {"id": self.model.name, "object": "model", "created": self._created, "owned_by": "tandem"}
        vllm = {"root": self.model.name, "parent": None, "max_model_len": self.pools.max_model_len()}
        await exchange.json({"object": "list", "data": [model | vllm]})

    async def health(self, exchange: Exchange) -> None:
        """200 when requests would be served, 503 else; empty, as vLLM's."""
        await exchange.whole(b"", "text/plain", 200 if self.ready() else 503)

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus' text, or OpenMetrics' where Accept asks for it."""
        try:
            encode, content_type = choose_encoder(exchange.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        await exchange.whole(encode(self.registry), content_type)

    async def version(self, exchange: Exchange) -> None:
        """Of the gateway."""
        await exchange.json({"version": package_version()})


@dataclass(frozen=True, slots=True)
class TokenizerPages:
    """vLLM's /tokenize and /detokenize."""

    model: ServedModel
    pools: Pools
    limits: RequestLimits
    bodies: BodyReader

    async def tokenize(self, exchange: Exchange) -> None:
        """A plain prompt's token ids, as its completion would be computed from."""
        tokenizer, body = self.model.tokenizer, await self._read(exchange)
        request = gateway_pb2.GenerateRequest(model=body.text("model") or "")
        if (prompt := body.text("prompt")) is None:
            raise body.wrong("prompt", "must be given")
        request.text = prompt
        special, with_names = body.flag("add_special_tokens"), body.flag("return_token_strs")
        body.end()
        check_request(request, self.model, self.limits)
        if special is False:
            encoded = await tokenizer.off_the_loop(len(prompt), lambda: tokenizer.backend.encode(prompt, add_special_tokens=False))
            tokens = list(encoded.ids)
        else:
            tokens = await prompt_token_ids(request, tokenizer, max_tokens=self.pools.max_model_len())
        names = [tokenizer.backend.id_to_token(token) for token in tokens] if with_names else None
        await exchange.json({"count": len(tokens), "max_model_len": self.pools.max_model_len(), "tokens": tokens, "token_strs": names})

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of token ids, special tokens too."""
        body = await self._read(exchange)
        model, tokens = body.text("model"), body.ids("tokens")
        body.end()
        if model and model != self.model.name:
            raise not_found("MODEL_NOT_FOUND", f"model {model[:128]!r} is not served; {self.model.name!r} is")
        if len(tokens) > self.model.max_model_len:
            raise body.wrong("tokens", f"is {len(tokens)} tokens, above the context of {self.model.max_model_len}")
        if problem := token_ids_problem(tokens, self.model.vocab_size):
            raise body.wrong("tokens", problem)
        decode = self.model.tokenizer.backend.decode
        text = await self.model.tokenizer.off_the_loop(len(tokens) * _CHARS_PER_TOKEN, lambda: decode(tokens, skip_special_tokens=False))
        await exchange.json({"prompt": text})

    async def _read(self, exchange: Exchange) -> Body:
        check_content_type(exchange.headers)
        with self.bodies.holding() as body:
            await self.bodies.read(exchange.headers, exchange.receive, body)
            raw = bytes(body.content)
            return await self.model.tokenizer.off_the_loop(len(raw), lambda: read_body(raw))
