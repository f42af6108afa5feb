"""Log probabilities of a prompt, in vLLM's shape: for each token the likeliest ones by id."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.http.asked import Json
from gateway.http.token_text import TokenText
from tandem.v1 import generation_pb2


def prompt_logprobs(entries: Sequence[generation_pb2.TokenLogprob], tokens: TokenText) -> list[Json | None]:
    """null for the prompt's first token, which has none."""
    return [None, *(_entry(entry, tokens) for entry in entries)]


def _entry(entry: generation_pb2.TokenLogprob, tokens: TokenText) -> Json:
    told = {
        str(top.token_id): {"logprob": top.logprob, "rank": rank, "decoded_token": tokens.text_of(top.token_id)}
        for rank, top in enumerate(entry.top_logprobs, 1)
    }
    # Where it stands among all tokens is known only when it is one of those that were told.
    told.setdefault(str(entry.token_id), {"logprob": entry.logprob, "rank": None, "decoded_token": tokens.text_of(entry.token_id)})
    return told
