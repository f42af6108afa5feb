"""Random requests through three processes, all of a batch at a time, and through one engine: everything that a client sees must be equal."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from checks.fuzz_cases import Case, Plain, plain_params, request_of
from checks.single_process import Answer, Sample, SingleProcess
from engine.sampling_params import SampledToken
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

_TIMEOUT_S = 60.0
_UNSPECIFIED = generation_pb2.Finish()


@dataclass
class Received:
    """A stream as its client saw it."""

    samples: list[Sample]
    logprobs: list[list[generation_pb2.TokenLogprob]]
    first_position: int
    prompt_logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    usage: generation_pb2.Usage | None = None
    seed: int | None = None
    trailers: dict[str, str] = field(default_factory=dict)

    def take(self, message: gateway_pb2.GenerateResponse) -> None:
        """Adds a message; an AssertionError says what a client could not make sense of."""
        sample = self.samples[message.index]
        assert self.usage is None, "a message came behind the usage"
        if message.prompt_logprobs or message.prompt_token_ids:
            assert not any(each.tokens for each in self.samples), "the prompt was told behind a token"
        self.prompt_logprobs.extend(message.prompt_logprobs)
        self.prompt_token_ids.extend(message.prompt_token_ids)
        if message.HasField("seed"):
            assert self.seed is None, "the seed was told twice"
            self.seed = message.seed
        if message.token_ids:
            assert sample.finish == _UNSPECIFIED, "a token came behind its sample's finish"
            assert message.position == self.first_position + len(sample.tokens), "positions have a gap"
        sample.tokens.extend(SampledToken(token_id) for token_id in message.token_ids)
        self.logprobs[message.index].extend(message.logprobs)
        sample.text += message.text
        if message.HasField("finish"):
            assert sample.finish == _UNSPECIFIED, "a sample finished twice"
            sample.finish.CopyFrom(message.finish)
        if message.HasField("usage"):
            self.usage = message.usage


@dataclass
class Differential:
    """Compares, and counts what was covered."""

    gateway: gateway_pb2_grpc.GatewayServiceStub
    reference: SingleProcess
    seen: Counter[str] = field(default_factory=Counter)
    """Cases by feature, paths and preempted ones among them."""
    _keys: itertools.count[int] = field(default_factory=itertools.count)
    _plain: dict[tuple[object, ...], Plain] = field(default_factory=dict)

    async def check(self, batch: Sequence[Case]) -> None:
        """Raises AssertionError with the request for the first difference."""
        async with asyncio.timeout(_TIMEOUT_S * len(batch)):
            prepared = [await self._prepare(case) for case in batch]
            received = await asyncio.gather(*(self._receive(request) for request, _ in prepared))
            for (request, answer), got in zip(prepared, received, strict=True):
                try:
                    self._compare(request, answer, got)
                except AssertionError as error:
                    raise AssertionError(f"{error}\n{request}") from None
                self._count(request, got)

    async def _prepare(self, case: Case) -> tuple[gateway_pb2.GenerateRequest, Answer]:
        request = request_of(case, await self._plain_of(case))
        answer = await self.reference.answer(request)
        if case.resume_at is not None and len(answer.samples[0].tokens) > 1:
            request.output_token_ids.extend(answer.samples[0].token_ids[: case.resume_at % len(answer.samples[0].tokens)])
        request.request_id = f"fuzz-{next(self._keys)}"
        return request, answer

    async def _plain_of(self, case: Case) -> Plain:
        params = plain_params(case)
        key = (case.stream, case.num_prompt_tokens, params.SerializeToString(deterministic=True))
        if key not in self._plain:
            model = self.reference.engine.model
            ids = generation_pb2.TokenIds(ids=case.prompt(model.vocab_size))
            sample = (await self.reference.answer(gateway_pb2.GenerateRequest(token_ids=ids, sampling_params=params))).samples[0]
            self._plain[key] = Plain(sample.token_ids, sample.text, model.vocab_size, model.eos_token_ids)
        return self._plain[key]

    async def _receive(self, request: gateway_pb2.GenerateRequest) -> Received:
        n = request.sampling_params.n if request.sampling_params.HasField("n") else 1
        received = Received([Sample() for _ in range(n)], [[] for _ in range(n)], len(request.output_token_ids))
        call = self.gateway.Generate(request, timeout=_TIMEOUT_S)
        try:
            async for message in call:
                received.take(message)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"it ended {error.code().name}: {error.details()}\n{request}") from None
        finally:
            call.cancel()
        received.trailers = {key: str(value) for key, value in (await call.trailing_metadata() or ())}
        return received

    def _compare(self, request: gateway_pb2.GenerateRequest, answer: Answer, got: Received) -> None:
        params, num_replayed = request.sampling_params, len(request.output_token_ids)
        for index, (expected, sample) in enumerate(zip(answer.samples, got.samples, strict=True)):
            where = f"sample {index}"
            _equal(f"{where}: tokens", [*request.output_token_ids, *sample.token_ids], expected.token_ids)
            _equal(f"{where}: finish", sample.finish, expected.finish)
            if num_replayed:
                assert expected.text.endswith(sample.text), f"{where}: text {sample.text!r} is no end of {expected.text!r}"
            else:
                _equal(f"{where}: text", sample.text, expected.text)
            _compare_logprobs(where, got.logprobs[index], expected.tokens[num_replayed:], asked=params.HasField("logprobs"))
        _compare_logprobs("prompt", got.prompt_logprobs, answer.prompt_logprobs, asked=params.HasField("prompt_logprobs") and not num_replayed)
        _equal("prompt token ids", got.prompt_token_ids, list(request.token_ids.ids) if request.echo else [])
        _equal("seed", got.seed, params.seed)
        num_prompt, num_output = len(request.token_ids.ids), sum(len(sample.tokens) for sample in answer.samples)
        assert got.usage is not None, "the usage is missing"
        usage = (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens)
        _equal("usage", usage, (num_prompt, num_output, num_prompt + num_output))
        assert got.usage.cached_tokens <= num_prompt, f"{got.usage.cached_tokens} cached tokens"
        if params.max_tokens - num_replayed <= 1:
            path = (got.trailers.get("tandem-path"), got.trailers.get("tandem-kv-bytes", "0"))
            _equal("path of at most one token", path, ("prefill_only", "0"))

    def _count(self, request: gateway_pb2.GenerateRequest, got: Received) -> None:
        neutral = {"n": 1, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        for field_, value in request.sampling_params.ListFields():
            self.seen[field_.name] += field_.name not in neutral or value != neutral[field_.name]
        self.seen["cases"] += 1
        self.seen["samples"] += len(got.samples)
        self.seen["echo"] += request.echo
        self.seen["resumes"] += bool(request.output_token_ids)
        self.seen["cached"] += bool(got.usage and got.usage.cached_tokens)
        self.seen[got.trailers.get("tandem-path", "no path")] += 1
        self.seen["stopped_by_string"] += any(sample.finish.WhichOneof("matched_stop") == "matched_stop_str" for sample in got.samples)
        self.seen["stopped_by_token"] += any(sample.finish.WhichOneof("matched_stop") == "matched_token_id" for sample in got.samples)


def _equal(what: str, got: object, expected: object) -> None:
    assert got == expected, f"{what}: got {got!r}, expected {expected!r}"


def _compare_logprobs(where: str, got: Sequence[generation_pb2.TokenLogprob], expected: Sequence[SampledToken], *, asked: bool) -> None:
    """Bit for bit: both sides computed in float32."""
    _equal(f"{where}: number of log probabilities", len(got), len(expected) if asked else 0)
    for entry, token in zip(got, expected if asked else (), strict=True):
        assert token.logprob is not None and not math.isnan(token.logprob), f"{where}: the reference has no log probability"
        told = (entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top_logprobs))
        _equal(f"{where}: log probability", told, (token.token_id, token.logprob, token.top_logprobs))
