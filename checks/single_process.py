"""The reference of the differential fuzz: one engine without prefix cache, and text by the plainest means."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from engine.async_engine import AsyncEngine
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.events import Failed, Finished, PromptLogprobs, Tokens
from engine.proto import finish_to_proto, sampling_params_from_proto
from engine.sampling_params import SampledToken
from engine.sequence import SequenceKind, SequenceSpec
from tandem.v1 import gateway_pb2, generation_pb2

SamplingParams = generation_pb2.SamplingParams


@dataclass
class Sample:
    """One sample as a client should see it."""

    tokens: list[SampledToken] = field(default_factory=list)
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)
    text: str = ""

    @property
    def token_ids(self) -> list[int]:
        """Without log probabilities."""
        return [token.token_id for token in self.tokens]


@dataclass
class Answer:
    """All samples of a request, and the prompt's log probabilities."""

    samples: list[Sample]
    prompt_logprobs: list[SampledToken] = field(default_factory=list)


@dataclass
class SingleProcess:
    """An engine that computes each request by itself."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    _keys: itertools.count[int] = field(default_factory=itertools.count)

    async def answer(self, request: gateway_pb2.GenerateRequest) -> Answer:
        """What `request` should get. Raises EngineError."""
        params = request.sampling_params
        answer = await self._generate(request.token_ids.ids, params)
        for sample in answer.samples:
            self._cut(sample, params)
            if request.echo:
                sample.text = self.tokenizer.decode(list(request.token_ids.ids), skip_special_tokens=_skips(params)) + sample.text
        return answer

    async def _generate(self, prompt: Iterable[int], params: SamplingParams) -> Answer:
        model = self.engine.model
        sampling = sampling_params_from_proto(params, vocab_size=model.vocab_size)
        spec = SequenceSpec(f"reference-{next(self._keys)}", tuple(prompt), sampling, SequenceKind.LOCAL)
        stream, answer, num_running = self.engine.submit(spec), Answer([Sample() for _ in range(sampling.n)]), sampling.n
        try:
            while num_running:
                for event in await stream.get():
                    match event:
                        case Tokens():
                            answer.samples[event.index].tokens.extend(event.tokens)
                        case PromptLogprobs():
                            answer.prompt_logprobs.extend(event.logprobs)
                        case Finished():
                            answer.samples[event.index].finish = finish_to_proto(event.finish)
                            num_running -= 1
                        case Failed():
                            raise EngineError(f"the reference failed: {event.error}")
                        case _:
                            pass
        finally:
            self.engine.release(spec.seq_id)
        return answer

    def _cut(self, sample: Sample, params: SamplingParams) -> None:
        """Text and stop strings, by decoding everything anew behind each token: a stop string ends the sample at the first token that completes one."""
        ended_by = sample.finish.matched_token_id if sample.finish.WhichOneof("matched_stop") else None
        num_silent = int(ended_by is not None and not params.include_stop_str_in_output)
        shown = sample.token_ids[: len(sample.tokens) - num_silent]
        sample.text, found = self._decode(shown, params), None
        ignored = self._certain(shown[: params.min_tokens], params)
        for count in range(params.min_tokens + 1, len(shown) + 1):
            # Behind its last token nothing can complete a character: what is there is the text.
            text = self._decode(shown, params) if count == len(shown) else self._certain(shown[:count], params)
            found = _first_match(text, params.stop, len(ignored))
            if found is not None:
                break
        if found is not None:
            start, stop = found
            del sample.tokens[count:]
            sample.text = text[: start + len(stop) if params.include_stop_str_in_output else start]
            sample.finish = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_stop_str=stop)

    def _certain(self, token_ids: list[int], params: SamplingParams) -> str:
        """Text that no later token can change: without what could be the beginning of a character."""
        return self._decode(token_ids, params).rstrip("\ufffd")

    def _decode(self, token_ids: list[int], params: SamplingParams) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=_skips(params))
        return text


def _skips(params: SamplingParams) -> bool:
    return params.skip_special_tokens if params.HasField("skip_special_tokens") else True


def _first_match(text: str, stops: Iterable[str], num_ignored: int) -> tuple[int, str] | None:
    """Start and string of the match that ends first behind `num_ignored` characters, of those that end together the longest."""
    ends = [
        (start + len(stop), start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start) and start + len(stop) > num_ignored
    ]
    return min(ends)[1:] if ends else None


@asynccontextmanager
async def running_single_process(model: Path) -> AsyncIterator[SingleProcess]:
    """An engine over `model` in float32, each prompt computed whole and alone."""
    engine = build_engine(EngineConfig(model, dtype="float32", num_blocks=512, num_threads=1, enable_prefix_caching=False))
    await engine.start()
    try:
        yield SingleProcess(engine, Tokenizer.from_file(str(model / "tokenizer.json")))
    finally:
        await engine.stop()
