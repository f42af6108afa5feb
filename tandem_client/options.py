"""What a call can be told beside its prompt."""

from __future__ import annotations

from typing import TypedDict

from tandem_client.sampling import Sampling


class Terms(TypedDict, total=False):
    """What may be given by name beside Sampling."""

    model: str | None
    """The served model's id; needed only when there are several."""
    request_id: str | None
    """Names the request in the server's traces and logs; drawn by the client when not given. A repeated attempt has `:2`, `:3` and so on behind it."""
    priority: int | None
    """Smaller is served first. Default 0."""
    echo: bool | None
    """Begin each sample's text with the prompt's, and tell the prompt's token ids. Default false."""
    timeout_s: float | None
    """Seconds for the whole call, retries, waits and resumes included. Default: the client's."""


class Options(Sampling, Terms, total=False):
    """Everything that may be given by name."""
