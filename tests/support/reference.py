"""The oracle: one engine in this process that does everything."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.async_engine import AsyncEngine
from engine.build import build_engine
from engine.config import EngineConfig
from engine.events import Failed
from engine.proto import sampling_params_from_proto
from engine.sampling_params import SampledToken
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import collect, sampled_tokens
from tests.support.live_request import request_of


@dataclass
class Reference:
    """A started engine without prefix cache: nothing that came before may help."""

    engine: AsyncEngine
    _keys: itertools.count[int] = field(default_factory=itertools.count)

    async def tokens(self, prompt: Iterable[int], **params: Any) -> list[int]:
        """Output tokens; `params` as of `request_of`."""
        return [token.token_id for token in await self.sampled(prompt, **params)]

    async def sampled(self, prompt: Iterable[int], **params: Any) -> list[SampledToken]:
        """Output tokens with their log probabilities, when asked for."""
        (tokens,) = await self.samples(prompt, **params)
        return tokens

    async def samples(self, prompt: Iterable[int], **params: Any) -> list[list[SampledToken]]:
        """The same of each of n samples."""
        request = request_of(prompt, **params)
        sampling = sampling_params_from_proto(request.sampling_params, vocab_size=self.engine.model.vocab_size)
        spec = SequenceSpec(f"reference-{next(self._keys)}", tuple(request.token_ids.ids), sampling, SequenceKind.LOCAL)
        events = await collect(self.engine, spec)
        failures = [event.error for event in events if isinstance(event, Failed)]
        assert not failures, f"the reference failed: {failures[0]}"
        return [sampled_tokens(events, index) for index in range(sampling.n)]


@asynccontextmanager
async def running_reference(model: Path) -> AsyncIterator[Reference]:
    """An engine over `model` in float32."""
    engine = build_engine(EngineConfig(model, dtype="float32", num_blocks=512, num_threads=1, enable_prefix_caching=False))
    await engine.start()
    try:
        yield Reference(engine)
    finally:
        await engine.stop()
