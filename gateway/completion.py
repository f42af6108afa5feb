"""One sample as it grows: decode's tokens in, text and finish out."""

from __future__ import annotations

from itertools import zip_longest

from gateway.detokenizer import Detokenizer
from gateway.resolved_request import ResolvedRequest
from gateway.served_model import ServedModel
from gateway.stop_strings import StopStrings
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2

_DECODES_REASONS = (generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_ABORT)


class BrokenStreamError(Exception):
    """Decode's stream skips or repeats something: a bug, and no text may come of it."""


class Completion:
    """Text, tokens and finish of one sample. Tokens of a resume are taken first: what they made certain was sent with them, so it only sets the state."""

    def __init__(self, index: int, request: ResolvedRequest, model: ServedModel) -> None:
        self.num_tokens = 0
        """Tokens of the sample so far, up to and including the one that completed a stop string; those of a resume count."""
        self.finish: generation_pb2.Finish | None = None
        self.index = index
        self._request = request
        self._detokenizer = Detokenizer(model.tokenizer.vocabulary, skip_special_tokens=request.skip_special_tokens)
        self._stop_strings = StopStrings(request.stop, include_in_output=request.include_stop_str_in_output)
        self._num_exempt = 0
        """Leading characters of the held text that the first min_tokens tokens completed: no stop string ends there."""
        self._unsent = ""
        """Of a resume that had ended: text that was held back behind its last token, and that only its end makes certain."""
        for token_id in request.output_token_ids:
            if not self.finished:
                self._take_token(token_id)
                self._notice_end(token_id)

    @property
    def finished(self) -> bool:
        """Nothing more will be taken."""
        return self.finish is not None

    @property
    def stopped_by_string(self) -> bool:
        """A stop string ended it here; decode does not know and goes on."""
        return self.finish is not None and self.finish.WhichOneof("matched_stop") == "matched_stop_str"

    def take(self, message: decode_pb2.DecodeServiceGenerateResponse) -> gateway_pb2.GenerateResponse | None:
        """The client's message for one of decode's, None when there is nothing to tell; the sample's last one has its finish. Raises BrokenStreamError."""
        if self.finished:
            if not self.stopped_by_string and (message.token_ids or message.HasField("finish")):
                raise BrokenStreamError(f"sample {self.index} went on behind its finish")
            return None
        return self._take(message)

    def _take(self, message: decode_pb2.DecodeServiceGenerateResponse) -> gateway_pb2.GenerateResponse | None:
        self._check(message)
        response, pieces = self._message(), []
        for token_id, logprobs in zip_longest(message.token_ids, message.logprobs):
            pieces.append(self._take_token(token_id))
            response.token_ids.append(token_id)
            if logprobs is not None:
                response.logprobs.append(logprobs)
            if self.finished:
                break
        if not self.finished and message.HasField("finish"):
            pieces.append(self._end(message.finish))
        response.text = "".join(pieces)
        return self._ended(response) if message.token_ids or self.finished else None

    def _check(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        """Raises BrokenStreamError for what no answer to this request can hold."""
        num_tokens, asked = len(message.token_ids), self._request.sampling_params.HasField("logprobs")
        if num_tokens and message.position != self.num_tokens:
            raise BrokenStreamError(f"token {message.position} of sample {self.index} came after {self.num_tokens} tokens")
        if self.num_tokens + num_tokens > self._request.max_tokens:
            raise BrokenStreamError(f"{self.num_tokens + num_tokens} tokens of sample {self.index}, above max_tokens {self._request.max_tokens}")
        if len(message.logprobs) != (num_tokens if asked else 0):
            raise BrokenStreamError(f"{len(message.logprobs)} log probabilities for {num_tokens} tokens of sample {self.index}")
        if message.HasField("finish") and message.finish.finish_reason not in _DECODES_REASONS:
            raise BrokenStreamError(f"sample {self.index} has ended for reason {message.finish.finish_reason}")

    def ended_message(self) -> gateway_pb2.GenerateResponse:
        """The only message of a resume that had ended before: whoever resumes it has its tokens, and not the message that ended it."""
        response = self._message()
        response.text = self._unsent
        return self._ended(response)

    def _message(self) -> gateway_pb2.GenerateResponse:
        return gateway_pb2.GenerateResponse(request_id=self._request.request_id, index=self.index, position=self.num_tokens)

    def _ended(self, response: gateway_pb2.GenerateResponse) -> gateway_pb2.GenerateResponse:
        if self.finish is not None:
            response.finish.CopyFrom(self.finish)
        return response

    def _take_token(self, token_id: int) -> str:
        """Text that became certain with the token; a token that ends the sequence has none, unless what stops is to be shown."""
        request = self._request
        self.num_tokens += 1
        may_stop = self.num_tokens > request.min_tokens
        if may_stop and token_id in request.stop_token_ids and not request.include_stop_str_in_output:
            return ""
        piece = self._detokenizer.push(token_id)
        text = self._watch(piece, self._num_exempt if may_stop else len(piece))
        return text + self._watch_held(decided=bool(piece), may_stop=may_stop) if request.stop and not self.finished else text

    def _watch_held(self, *, decided: bool, may_stop: bool) -> str:
        """A stop string may be complete in text that only a further token would decide, and there is none behind a stop string."""
        self._num_exempt = 0 if decided else self._num_exempt
        held = self._detokenizer.held()
        if not may_stop:
            self._num_exempt = len(held)
        elif self._stop_strings.would_match(held, num_exempt=self._num_exempt):
            return self._watch(self._detokenizer.flush(), self._num_exempt)
        return ""

    def _watch(self, piece: str, num_exempt: int) -> str:
        checked = self._stop_strings.push(piece, num_exempt=num_exempt)
        if checked.matched is not None:
            self.finish = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_stop_str=checked.matched)
        return checked.text

    def _end(self, finish: generation_pb2.Finish) -> str:
        """Text that was held back; a stop string may be complete with the last character only."""
        rest = self._detokenizer.flush()
        text = self._watch(rest, self._num_exempt if self.num_tokens > self._request.min_tokens else len(rest))
        if not self.finished:
            self.finish = finish
            text += self._stop_strings.flush()
        return text

    def _notice_end(self, token_id: int) -> None:
        """A resumed sequence may have ended by itself."""
        if self.finished:
            return
        if token_id in self._request.stop_token_ids and self.num_tokens > self._request.min_tokens:
            self._unsent = self._end(generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_token_id=token_id))
        elif self.num_tokens >= self._request.max_tokens:
            self._unsent = self._end(generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_LENGTH))
