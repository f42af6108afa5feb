"""What a stream has brought so far, whichever way it is read."""

from __future__ import annotations

from typing import TypeVar

from tandem_client.completion import Choice, Usage
from tandem_client.generation import Generation
from tandem_client.piece import Finish

T = TypeVar("T")


class Received:
    """Of a stream. What stands on its last message is there when it has been read to its end."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def request_id(self) -> str:
        """As the caller named it, or as the client drew it."""
        return self._generation.request_id

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The samples as far as they have come; also of a stream that failed or was cancelled."""
        return self._generation.answer.choices()

    @property
    def num_tokens(self) -> int:
        """Tokens that have come, of all samples."""
        return self._generation.answer.num_tokens

    @property
    def num_retries(self) -> int:
        """Attempts so far that failed before they brought a token."""
        return self._generation.attempts.num_retries

    @property
    def num_resumes(self) -> int:
        """Cuts so far behind which the client went on."""
        return self._generation.attempts.num_resumes

    @property
    def seed(self) -> int:
        """The seed in force, from the first message on. Raises RuntimeError before it."""
        return _there(self._generation.answer.seed, "seed", "the first message")

    @property
    def finish(self) -> Finish:
        """How the first sample ended. Raises RuntimeError before it has."""
        return _there(self.choices[0].finish, "finish", "the end of the first sample")

    @property
    def usage(self) -> Usage:
        """What the request cost. Raises RuntimeError before the stream's end."""
        return _there(self._generation.answer.usage, "usage", "the end of the stream")


def _there(value: T | None, name: str, since: str) -> T:
    if value is None:
        raise RuntimeError(f"{name} is known from {since} on")
    return value
