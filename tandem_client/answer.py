"""A request's answer as it grows, over all its attempts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.v1 import gateway_pb2, generation_pb2
from tandem_client.completion import Choice, Usage
from tandem_client.piece import Finish, FinishReason, Piece, TokenLogprob, TopLogprob

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    generation_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


class BrokenAnswerError(Exception):
    """The server's messages do not fit together: something was lost or repeated."""


@dataclass(slots=True)
class _Sample:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class Answer:
    """Takes messages in order; a message that would leave a gap, or tell a token twice, is refused."""

    def __init__(self, n: int) -> None:
        self.seed: int | None = None
        self.model = ""
        self.usage: Usage | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.prompt_token_ids: list[int] = []
        self.num_tokens = 0
        """Of all samples."""
        self._n = n
        self._samples: dict[int, _Sample] = {}
        """Those that came: as long as the gateway has not taken the request, n may be any number."""

    @property
    def complete(self) -> bool:
        """The last message has come: usage stands on it alone, and all samples have ended."""
        return self.usage is not None and sum(sample.finish is not None for sample in self._samples.values()) == self._n

    @property
    def token_ids(self) -> list[int]:
        """The first sample's."""
        return self._samples[0].token_ids if 0 in self._samples else []

    def begin_again(self) -> None:
        """A new attempt, before any token came: it tells everything anew."""
        self.seed, self.usage = None, None
        self.prompt_logprobs.clear()
        self.prompt_token_ids.clear()

    def take(self, message: gateway_pb2.GenerateResponse) -> Piece | None:
        """What the message adds; None when that is nothing of a sample. Raises BrokenAnswerError."""
        if self.seed is None and message.HasField("seed"):
            self.seed, self.model = message.seed, message.model
            self.prompt_token_ids.extend(message.prompt_token_ids)
        elif message.HasField("seed") and (message.seed, message.model) != (self.seed, self.model):
            raise BrokenAnswerError(f"it began by model {self.model!r} with seed {self.seed}, and goes on by {message.model!r} with {message.seed}")
        if message.HasField("usage"):
            self.usage = _usage(message.usage)
        if message.prompt_logprobs:
            self.prompt_logprobs.extend(_logprobs(message.prompt_logprobs))
        if message.token_ids or message.text or message.HasField("finish"):
            return self._take(message)
        return None

    def _take(self, message: gateway_pb2.GenerateResponse) -> Piece:
        if message.index >= self._n:
            raise BrokenAnswerError(f"sample {message.index} of {self._n} came")
        sample = self._samples.setdefault(message.index, _Sample())
        if sample.finish is not None:
            raise BrokenAnswerError(f"sample {message.index} went on behind its finish")
        if message.token_ids and message.position != len(sample.token_ids):
            raise BrokenAnswerError(f"token {message.position} of sample {message.index} came behind {len(sample.token_ids)} tokens")
        piece = Piece(
            text=message.text,
            token_ids=tuple(message.token_ids),
            logprobs=tuple(_logprobs(message.logprobs)),
            index=message.index,
            position=len(sample.token_ids),
            finish=_finish(message.finish) if message.HasField("finish") else None,
        )
        sample.texts.append(piece.text)
        sample.token_ids.extend(piece.token_ids)
        sample.logprobs.extend(piece.logprobs)
        sample.finish = piece.finish
        self.num_tokens += len(piece.token_ids)
        return piece

    def choices(self) -> tuple[Choice, ...]:
        """The samples as far as they have come, each of them from the first message on."""
        number = self._n if self._samples else 1
        samples = [self._samples.get(index) or _Sample() for index in range(number)]
        return tuple(
            Choice(index, "".join(sample.texts), tuple(sample.token_ids), tuple(sample.logprobs), sample.finish) for index, sample in enumerate(samples)
        )


def _usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens)


def _finish(finish: generation_pb2.Finish) -> Finish:
    match finish.WhichOneof("matched_stop"):
        case "matched_token_id":
            matched: str | int | None = finish.matched_token_id
        case "matched_stop_str":
            matched = finish.matched_stop_str
        case _:
            matched = None
    return Finish(_REASONS.get(finish.finish_reason, FinishReason.ABORT), matched)


def _logprobs(logprobs: Iterable[generation_pb2.TokenLogprob]) -> Iterable[TokenLogprob]:
    for one in logprobs:
        yield TokenLogprob(one.token_id, one.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in one.top_logprobs))
