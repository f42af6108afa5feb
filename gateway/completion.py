"""One completion as it grows: decode's tokens in, the client's messages out."""

from __future__ import annotations

from gateway.detokenizer import Detokenizer
from gateway.served_model import ServedModel
from gateway.stop_strings import StopStrings
from gateway.validation import ResolvedRequest
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2


class BrokenStreamError(Exception):
    """Decode's stream skips or repeats tokens: a bug, and no text may come of it."""


class Completion:
    """Text, tokens and finish of one sample. Tokens of a resume are taken first: their text was sent before, so it only sets the state."""

    def __init__(self, request: ResolvedRequest, model: ServedModel) -> None:
        self.num_tokens = 0
        """Tokens of the completion so far, up to and including the one that completed a stop string; those of a resume count."""
        self.cached_tokens = 0
        self.finish: generation_pb2.Finish | None = None
        self._request = request
        self._model_name = model.name
        self._detokenizer = Detokenizer(model.tokenizer.backend, skip_special_tokens=request.skip_special_tokens)
        self._stop_strings = StopStrings(request.stop, include_in_output=request.include_stop_str_in_output)
        self._sent_any = False
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
        """The client's message for one of decode's, None when there is nothing to tell; the last one when `finish` is set then. Raises BrokenStreamError."""
        response = gateway_pb2.GenerateResponse(request_id=self._request.request_id, position=self.num_tokens)
        if message.HasField("prompt"):
            self.cached_tokens = message.prompt.cached_tokens
        if message.token_ids and message.position != self.num_tokens:
            raise BrokenStreamError(f"token {message.position} came after {self.num_tokens} tokens")
        pieces = []
        for index, token_id in enumerate(message.token_ids):
            pieces.append(self._take_token(token_id))
            response.token_ids.append(token_id)
            if index < len(message.logprobs):
                response.logprobs.append(message.logprobs[index])
            if self.finished:
                break
        if not self.finished and message.HasField("finish"):
            pieces.append(self._end(message.finish))
        response.text = "".join(pieces)
        return self._complete(response) if message.token_ids or self.finished else None

    def ended_message(self) -> gateway_pb2.GenerateResponse:
        """The only message of a resume that had ended before."""
        return self._complete(gateway_pb2.GenerateResponse(request_id=self._request.request_id, position=self.num_tokens))

    def usage(self) -> generation_pb2.Usage:
        """Tokens so far. In a resume decode's cached tokens may be some of the replayed output, which is no part of the prompt."""
        num_prompt = len(self._request.prompt_token_ids)
        cached_tokens = min(self.cached_tokens, num_prompt)
        return generation_pb2.Usage(
            prompt_tokens=num_prompt, completion_tokens=self.num_tokens, total_tokens=num_prompt + self.num_tokens, cached_tokens=cached_tokens
        )

    def _take_token(self, token_id: int) -> str:
        """Text that became certain with the token; a token that ends the sequence has none, unless what stops is to be shown."""
        self.num_tokens += 1
        if token_id in self._request.stop_token_ids and not self._request.include_stop_str_in_output:
            return ""
        return self._watch(self._detokenizer.push(token_id))

    def _watch(self, piece: str) -> str:
        checked = self._stop_strings.push(piece)
        if checked.matched is not None:
            self.finish = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_stop_str=checked.matched)
        return checked.text

    def _end(self, finish: generation_pb2.Finish) -> str:
        """Text that was held back; a stop string may be complete with the last character only."""
        text = self._watch(self._detokenizer.flush())
        if not self.finished:
            self.finish = finish
            text += self._stop_strings.flush()
        return text

    def _notice_end(self, token_id: int) -> None:
        """A resumed sequence may have ended by itself."""
        if self.finished:
            return
        if token_id in self._request.stop_token_ids:
            self.finish = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_token_id=token_id)
        elif self.num_tokens >= self._request.max_tokens:
            self.finish = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_LENGTH)

    def _complete(self, response: gateway_pb2.GenerateResponse) -> gateway_pb2.GenerateResponse:
        if not self._sent_any:
            self._sent_any = True
            response.seed, response.model = self._request.seed, self._model_name
        if self.finish is not None:
            response.finish.CopyFrom(self.finish)
            response.usage.CopyFrom(self.usage())
        return response
