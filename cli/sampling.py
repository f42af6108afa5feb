"""The flags of `tandem generate` that say how to sample, as the request's parameters."""

from __future__ import annotations

from collections.abc import Iterable

from cli.errors import UserError
from tandem.v1 import generation_pb2


def sampling_params(*, logit_bias: Iterable[str] = (), **given: object) -> generation_pb2.SamplingParams:
    """By the names of SamplingParams' fields; None and empty lists are left out. `logit_bias` holds ID=VALUE. Raises UserError."""
    fields = {name: value for name, value in given.items() if value is not None}
    biases = dict(map(_bias, logit_bias))
    try:
        return generation_pb2.SamplingParams(**fields, logit_bias=biases)  # type: ignore[arg-type] # the flags have the fields' types
    except ValueError as error:  # a number that is too large for its field
        raise UserError(str(error)) from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise UserError(f"--logit-bias {text!r} is not of the form ID=VALUE, such as 123=-5") from None
