"""One fault at a time in a running cluster: what it was answered by, and whether the client ever saw a wrong token."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from checks.handover_faults_cluster import Cluster
from checks.handover_faults_kinds import IN_STREAM, PAUSING, STALE, Kind, Order, Pause
from checks.one_engine import Prompt
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2

_STREAM_S, _LET_GO_S, _POLL_S = 30.0, 10.0, 0.005


class NotInjectedError(Exception):
    """A fault did not happen: the run proves nothing."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what one process answers."""

    prompt: Prompt
    answer: list[int]
    salt: bytes
    """Its own: no prefix cache has any of it, unless it is asked again."""


@dataclass
class Stream:
    """What a client got."""

    tokens: list[int]
    report: decode_pb2.PromptReport = field(default_factory=decode_pb2.PromptReport)
    handover: decode_pb2.HandoverReport = field(default_factory=decode_pb2.HandoverReport)
    error: str = ""
    """Empty: it ended OK."""


@dataclass
class Tally:
    """Faults of one kind in one cluster."""

    injected: int = 0
    detected: int = 0
    wrong: int = 0
    """Streams with a token that one process does not give."""
    failed: int = 0
    """Streams that did not end OK."""
    unhealed: int = 0
    """Faults behind which the next hand-over did not take the same path."""
    by: Counter[str] = field(default_factory=Counter)
    """Who computed the prompt in the end."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What decode's metrics say of the failed attempts."""


class Rounds:
    """Faults and plain hand-overs in turn, over prompts whose right answers are known."""

    def __init__(self, cluster: Cluster, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], seed: int, *, verifies: bool = True) -> None:
        self.cluster = cluster
        self._verifies = verifies
        self.tallies: dict[Kind, Tally] = {}
        self._turns = itertools.cycle(zip(prompts, answers, strict=True))
        self._seeds = itertools.count(seed)

    async def run(self, kind: Kind, count: int) -> Tally:
        """That many faults of a kind, each with a plain hand-over behind it. Raises NotInjectedError."""
        tally = self.tallies.setdefault(kind, Tally())
        for _ in range(count):
            await self._one(kind, tally)
        return tally

    async def _one(self, kind: Kind, tally: Tally) -> None:
        question = self._next()
        if kind is Kind.KILLED_DECODE:
            stream, detected = await self._with_killed_decode(question)
        else:
            before = Counter(await self.cluster.decode.failures())
            stream = await self._with_fault(Order(kind, next(self._seeds)), question)
            tally.reasons += Counter(await self.cluster.decode.failures()) - before
            detected = stream.report.num_failed_attempts == 1
        tally.injected += 1
        tally.detected += detected
        tally.by[stream.report.prefill_instance or "decode"] += 1
        self._judge(stream, question, tally)
        # Every second time the same once more: a block of the failed copy that a prefix cache took in would be seen. What is overwritten behind the ledger of
        # prefill's pool stays in its own cache.
        again = self._verifies and kind not in STALE and tally.injected % 2
        await self._plainly(tally, question if again else self._next())

    def _next(self) -> Question:
        prompt, answer = next(self._turns)
        return Question(prompt, list(answer), secrets.token_bytes(8))

    def _judge(self, stream: Stream, question: Question, tally: Tally) -> None:
        tally.failed += bool(stream.error)
        tally.wrong += stream.tokens != question.answer[: len(stream.tokens) if stream.error else None]

    async def _plainly(self, tally: Tally, question: Question) -> None:
        """The next hand-over, on the same path. A request that finds a worker unpaired makes it try again at once."""
        while not await self.cluster.is_paired():
            other = self._next()
            self._judge(await self._generate(other), other, tally)
        stream = await self._generate(question)
        self._judge(stream, question, tally)
        went = (stream.report.path, stream.report.prefill_instance, stream.report.num_failed_attempts, stream.handover.transport)
        tally.unhealed += went != (decode_pb2.PROMPT_PATH_HANDOVER, self.cluster.prefill.name, 0, self.cluster.transport)

    async def _with_fault(self, order: Order, question: Question) -> Stream:
        cluster = self.cluster
        worker = cluster.prefill if order.kind in IN_STREAM else cluster.decode
        before = (await worker.injected()).get(order.kind, 0)
        await worker.order(order)
        streaming = asyncio.create_task(self._generate(question))
        if order.kind in PAUSING:
            at = await self._paused(streaming)
            await self._do(order, at)
            cluster.decode.go_on()
        stream = await streaming
        if (await worker.injected()).get(order.kind, 0) != before + 1:
            raise NotInjectedError(f"{order} was not injected by {cluster.transport}")
        if order.kind is Kind.KILLED_PREFILL:
            await cluster.prefill.start()
            await cluster.prefill.ready()
        return stream

    async def _paused(self, streaming: asyncio.Task[Stream]) -> Pause:
        pausing = asyncio.create_task(self.cluster.decode.paused())
        await asyncio.wait({pausing, streaming}, return_when=asyncio.FIRST_COMPLETED)
        if not pausing.done():
            raise NotInjectedError(f"no reader came by: {streaming.result()}")
        return await pausing

    async def _do(self, order: Order, at: Pause) -> None:
        prefill = self.cluster.prefill
        if order.kind is Kind.KILLED_PREFILL:
            await prefill.kill()
            return
        deed = "make_stale" if order.kind in STALE else "reuse"
        if not await prefill.do(deed, at.first_block, at.num_blocks, order.seed):
            raise NotInjectedError(f"{order} changed nothing in the blocks {at}")

    async def _with_killed_decode(self, question: Question) -> tuple[Stream, bool]:
        """What the client got before and, as a gateway would ask for it, behind the restart. Detected: the stream broke and prefill let everything go."""
        cluster = self.cluster
        await cluster.decode.order(Order(Kind.KILLED_DECODE, next(self._seeds)))
        streaming = asyncio.create_task(self._generate(question))
        await self._paused(streaming)
        await cluster.decode.kill()
        cut = await streaming
        let_go = await self.nothing_held("prefill")
        await cluster.decode.start()
        await cluster.decode.ready()
        await cluster.paired()
        if not cut.error or cut.tokens != question.answer[: len(cut.tokens)]:
            return cut, False
        rest = await self._generate(question, cut.tokens)
        return rest, let_go

    async def nothing_held(self, role: str = "") -> bool:
        """Waits a bounded time until no live worker, or none of `role`, holds anything for anybody."""
        workers = [worker for worker in self.cluster.workers if role in ("", worker.role)]
        deadline = asyncio.get_running_loop().time() + _LET_GO_S
        while sum([await worker.num_held() for worker in workers]):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _generate(self, question: Question, output: Sequence[int] = ()) -> Stream:
        """As a gateway asks."""
        params = generation_pb2.SamplingParams(max_tokens=question.prompt.num_output_tokens, temperature=0.0, ignore_eos=True, seed=1)
        request = decode_pb2.DecodeServiceGenerateRequest(
            request_id="fault",
            tenant_salt=question.salt,
            prompt_token_ids=question.prompt.token_ids,
            output_token_ids=output,
            sampling_params=params,
            prefill_instance=self.cluster.prefill.name,
        )
        stream = Stream(list(output))
        try:
            async for message in decode_pb2_grpc.DecodeServiceStub(self.cluster.decode.channel).Generate(request, timeout=_STREAM_S):
                stream.tokens.extend(message.token_ids)
                if message.HasField("prompt"):
                    stream.report.CopyFrom(message.prompt)
                if message.HasField("handover"):
                    stream.handover.CopyFrom(message.handover)
        except grpc.aio.AioRpcError as error:
            stream.error = f"{error.code().name}: {error.details()}"
        return stream
