"""The token ids of an encoded prompt, listed only when there are not too many."""

from __future__ import annotations

from tokenizers import Encoding


class TooManyTokensError(Exception):
    """The prompt cannot fit into the context; the text is for the client."""


def prompt_ids(encoding: Encoding, max_tokens: int | None) -> list[int]:
    """Ids of an encoding. Raises TooManyTokensError.

    Counting comes first: making a list of millions holds the interpreter's lock for longer than the event loop may stall.
    """
    if max_tokens is not None and len(encoding) > max_tokens:
        raise TooManyTokensError(f"is {len(encoding)} tokens, above the context of {max_tokens}")
    return list(encoding.ids)
