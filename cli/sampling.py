"""The flags of `tandem generate` that say how to sample, as the request's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from cli.errors import UserError
from tandem_client import Sampling
from tandem_client.sampling import sampling_params


def sampling_flags(*, logit_bias: Iterable[str] = (), **given: object) -> Sampling:
    """By the names of Sampling; None and empty lists are left out. `logit_bias` holds ID=VALUE. Raises UserError."""
    flags = {name: value for name, value in given.items() if value is not None and value != []}
    if biases := dict(map(_bias, logit_bias)):
        flags["logit_bias"] = biases
    try:
        sampling_params(flags)
    except ValueError as error:  # a number that is too large for its field
        raise UserError(str(error)) from None
    return cast("Sampling", flags)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise UserError(f"--logit-bias {text!r} is not of the form ID=VALUE, such as 123=-5") from None
