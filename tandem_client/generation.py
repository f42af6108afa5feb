"""One request over all its attempts: what to send, what came, and what follows from an end. All that is not input and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc

from tandem.v1 import gateway_pb2
from tandem_client.answer import Answer, BrokenAnswerError
from tandem_client.attempts import Attempts, NoMoreAttempts
from tandem_client.completion import Completion, RequestPath
from tandem_client.errors import Cancelled, TandemError
from tandem_client.failure import Failure
from tandem_client.piece import Piece

Open = Callable[[gateway_pb2.GenerateRequest, float | None], Any]
"""Begins an attempt: request, timeout in seconds."""
_MAX_ID_CHARS = 120
"""Of a request id that a number is to stand behind; the gateway takes 128."""


class Generation:
    """Driven by a stream of either kind: `attempt`, then `take` for each message, then `ended` or `failed`; and again as long as `failed` says so."""

    def __init__(self, request: gateway_pb2.GenerateRequest, attempts: Attempts) -> None:
        self.request_id = request.request_id
        self._n = request.sampling_params.n or 1
        self.answer = Answer(self._n)
        self.path: RequestPath | None = None
        """None until the answer is whole."""
        self._request = request
        self.attempts = attempts
        self._num_before = 0
        """Tokens that had come when the attempt began."""
        self._error: TandemError | None = None

    @property
    def has_ended(self) -> bool:
        """The answer is whole. Raises the TandemError that it ended with."""
        if self._error is not None:
            raise self._error
        return self.path is not None

    def attempt(self) -> tuple[gateway_pb2.GenerateRequest, float | None]:
        """The next attempt's request and its timeout: the first tokens' own seed and model, and all tokens that came, when some have."""
        timeout_s = self.attempts.begin()
        request, answer = self._request, self.answer
        self._num_before = answer.num_tokens
        if self.attempts.number > 1:
            request = gateway_pb2.GenerateRequest()
            request.CopyFrom(self._request)
            # A broken connection's request may still be in flight on the other side, and an id is taken as long as it is.
            request.request_id = f"{self.request_id[:_MAX_ID_CHARS]}:{self.attempts.number}"
            if not answer.num_tokens:
                answer.begin_again()
        if answer.num_tokens:
            if answer.seed is not None:
                request.sampling_params.seed, request.model = answer.seed, answer.model
            request.output_token_ids[:] = answer.token_ids
        return request, timeout_s

    def take(self, message: gateway_pb2.GenerateResponse) -> Piece | None:
        """The piece that a message brings, None for none. Raises TandemError."""
        try:
            return self.answer.take(message)
        except BrokenAnswerError as error:
            raise self._fail(Failure(grpc.StatusCode.INTERNAL, f"the gateway broke its stream: {error}", "BROKEN_STREAM")) from None

    def ended(self, trailers: Mapping[str, str]) -> None:
        """The attempt ended with OK. Raises TandemError."""
        if not self.answer.complete:
            raise self._fail(Failure(grpc.StatusCode.INTERNAL, "the gateway ended its stream without a finish", "BROKEN_STREAM"))
        self.path = RequestPath.of(trailers)
        self.attempts.ended_well()

    def failed(self, error: Any) -> float | None:
        """The attempt ended with a grpc.RpcError: seconds to wait before the next one, None when the answer is whole all the same. Raises TandemError."""
        failure, answer = Failure.of(error), self.answer
        if answer.complete:
            self.ended(failure.trailers)
            return None
        began = answer.num_tokens > 0
        if began and self._n > 1 and failure.is_cut:
            raise self._fail(replace(failure, message=f"{failure.message}; not resumed: a stream of {self._n} samples cannot be")) from error
        try:
            return self.attempts.after(failure, began=began, advanced=answer.num_tokens > self._num_before)
        except NoMoreAttempts as final:
            raise self._fail(failure, str(final)) from error

    def cancelled(self) -> TandemError:
        """This side has left; what came stays."""
        if self._error is None:
            self._error = Cancelled.here(self.request_id, self.answer.num_tokens)
        return self._error

    def completion(self) -> Completion:
        """The whole; only when it has ended."""
        answer = self.answer
        assert self.path is not None and answer.usage is not None, "it has not ended"
        return Completion(
            choices=answer.choices(),
            usage=answer.usage,
            seed=answer.seed or 0,
            model=answer.model,
            request_id=self.request_id,
            path=self.path,
            prompt_logprobs=tuple(answer.prompt_logprobs),
            prompt_token_ids=tuple(answer.prompt_token_ids),
            num_retries=self.attempts.num_retries,
            num_resumes=self.attempts.num_resumes,
        )

    def _fail(self, failure: Failure, note: str = "") -> TandemError:
        """Notes the end; `note` says why it was not tried again."""
        self._error = TandemError.of(_as_told(failure, began=self.answer.num_tokens > 0), self.request_id, self.answer.num_tokens)
        if note:
            self._error.add_note(note)
        return self._error


def _as_told(failure: Failure, *, began: bool) -> Failure:
    """What the caller is to hear: a cut is one whatever status it came as, and a deadline that this side saw pass has a phase too."""
    if failure.is_cut and (began or failure.code is grpc.StatusCode.CANCELLED):
        return replace(failure, code=grpc.StatusCode.UNAVAILABLE)
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and "phase" not in failure.metadata:
        return replace(failure, metadata={**failure.metadata, "phase": "decode" if began else "first_token"})
    return failure
