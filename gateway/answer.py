"""A request's answer as it grows: decode's messages of all samples in, the client's messages out."""

from __future__ import annotations

from gateway.completion import BrokenStreamError, Completion
from gateway.resolved_request import ResolvedRequest
from gateway.served_model import ServedModel
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2


class Answer:
    """One completion per sample, and what is told once for all of them.

    Seed, model, the prompt's length and, with echo, its token ids go out with the first message, the usage with the last. Log probabilities of the prompt come
    in front of any token, and all of them.
    """

    def __init__(self, request: ResolvedRequest, model: ServedModel, *, prompt_text: str = "") -> None:
        """`prompt_text` stands in front of each sample's text."""
        self.completions = tuple(Completion(index, request, model) for index in range(request.n))
        self.began = False
        """The client has been told something."""
        self.cached_tokens = 0
        self._request = request
        self._model_name = model.name
        self._prompt_text = prompt_text
        self._unechoed = set(range(request.n)) if prompt_text else set[int]()
        self._num_prompt_logprobs = 0

    @property
    def finished(self) -> bool:
        """Nothing more will be taken."""
        return all(completion.finished for completion in self.completions)

    @property
    def decode_goes_on(self) -> bool:
        """A stop string ended a sample, of which decode knows nothing."""
        return any(completion.stopped_by_string for completion in self.completions)

    @property
    def finish_reasons(self) -> list[generation_pb2.FinishReason]:
        """Of the samples that have finished."""
        return [completion.finish.finish_reason for completion in self.completions if completion.finish is not None]

    def take(self, message: decode_pb2.DecodeServiceGenerateResponse) -> gateway_pb2.GenerateResponse | None:
        """The client's message for one of decode's, None when there is nothing to tell. Raises BrokenStreamError."""
        if message.HasField("prompt"):
            self.cached_tokens = message.prompt.cached_tokens
        if message.prompt_logprobs:
            return self._take_prompt_logprobs(message)
        if message.index >= len(self.completions):
            raise BrokenStreamError(f"sample {message.index} of {len(self.completions)}")
        if (message.token_ids or message.HasField("finish")) and self._num_prompt_logprobs != self._request.num_prompt_logprobs:
            raise BrokenStreamError(f"{self._num_prompt_logprobs} log probabilities of the prompt and not {self._request.num_prompt_logprobs}")
        response = self.completions[message.index].take(message)
        return self._complete(response) if response is not None else None

    def ended_message(self) -> gateway_pb2.GenerateResponse:
        """The only message of a resume that had ended before."""
        return self._complete(self.completions[0].ended_message())

    def usage(self) -> generation_pb2.Usage:
        """Tokens so far. In a resume decode's cached tokens may be some of the replayed output, which is no part of the prompt."""
        num_prompt = len(self._request.prompt_token_ids)
        num_completion = sum(completion.num_tokens for completion in self.completions)
        return generation_pb2.Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            cached_tokens=min(self.cached_tokens, num_prompt),
        )

    def _take_prompt_logprobs(self, message: decode_pb2.DecodeServiceGenerateResponse) -> gateway_pb2.GenerateResponse:
        self._num_prompt_logprobs += len(message.prompt_logprobs)
        if self._num_prompt_logprobs > self._request.num_prompt_logprobs:
            raise BrokenStreamError(f"{self._num_prompt_logprobs} log probabilities of the prompt, above {self._request.num_prompt_logprobs}")
        if message.token_ids or message.HasField("finish"):
            raise BrokenStreamError("log probabilities of the prompt came with tokens")
        return self._complete(gateway_pb2.GenerateResponse(request_id=self._request.request_id, prompt_logprobs=message.prompt_logprobs))

    def _complete(self, response: gateway_pb2.GenerateResponse) -> gateway_pb2.GenerateResponse:
        if not self.began:
            self.began = True
            response.seed, response.model, response.prompt_tokens = self._request.seed, self._model_name, len(self._request.prompt_token_ids)
            if self._request.echo:
                response.prompt_token_ids.extend(self._request.prompt_token_ids)
        if response.index in self._unechoed and not response.prompt_logprobs:
            self._unechoed.discard(response.index)
            response.text = self._prompt_text + response.text
        if self.finished:
            response.usage.CopyFrom(self.usage())
        return response
