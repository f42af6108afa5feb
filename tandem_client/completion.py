"""A whole answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem_client.piece import Finish, TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost in tokens."""

    prompt_tokens: int
    completion_tokens: int
    """Of all samples; those that a resume went on behind count."""
    total_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from a prefix cache, in the last attempt."""


@dataclass(frozen=True, slots=True)
class RequestPath:
    """How the last attempt went through the server, from its trailing metadata; empty where the server did not say."""

    kind: str = ""
    """handover, local, local_fallback or prefill_only."""
    decode_instance: str = ""
    prefill_instance: str = ""
    kv_transport: str = ""
    kv_bytes: int = 0
    trailers: tuple[tuple[str, str], ...] = ()
    """All trailing metadata whose keys begin with tandem-, without that prefix."""

    @classmethod
    def of(cls, trailers: Mapping[str, str]) -> RequestPath:
        """From trailers without their prefix."""
        num_bytes = trailers.get("kv-bytes", "")
        return cls(
            kind=trailers.get("path", ""),
            decode_instance=trailers.get("decode-instance", ""),
            prefill_instance=trailers.get("prefill-instance", ""),
            kv_transport=trailers.get("kv-transport", ""),
            kv_bytes=int(num_bytes) if num_bytes.isdecimal() else 0,
            trailers=tuple(trailers.items()),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each token, when asked for."""
    finish: Finish | None
    """None as long as it has not ended; in a Completion all have."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `text`, `token_ids`, `logprobs` and `finish` are the first sample's."""

    choices: tuple[Choice, ...]
    """By index."""
    usage: Usage
    seed: int
    """The seed in force: with it the same request gives the same noise."""
    model: str
    request_id: str
    """As the caller named it, or as the client drew it."""
    path: RequestPath
    prompt_logprobs: tuple[TokenLogprob, ...]
    """Of the prompt's tokens from the second on, when asked for."""
    prompt_token_ids: tuple[int, ...]
    """With `echo`."""
    num_retries: int
    """Attempts that failed before they brought a token."""
    num_resumes: int
    """Cuts behind which the client went on."""

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sample."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the first sample, one for each token, when asked for."""
        return self.choices[0].logprobs

    @property
    def finish(self) -> Finish:
        """How the first sample ended."""
        finish = self.choices[0].finish
        assert finish is not None, "a completion is made of samples that have ended"
        return finish
