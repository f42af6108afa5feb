"""Errors of the engine as statuses of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import CapacityError, EngineDeadError, EngineError, HoldBrokenError, NoTokenLeftError, SequenceTooLongError
from engine.proto import FieldError
from rpc.errors import StatusError, aborted, exhausted, internal, invalid_argument, unavailable

_RETRY_S = 1.0


def status_of(error: Exception) -> StatusError:
    """The status that tells a caller what happened and what to do: change the request, come back later, or go elsewhere."""
    match error:
        case FieldError():
            return invalid_argument(error.field, error.description)
        case NoTokenLeftError():
            return invalid_argument("sampling_params", str(error).removeprefix("the sampling parameters "))
        case SequenceTooLongError():
            return invalid_argument("prompt_token_ids", str(error))
        case CapacityError():
            return exhausted("NO_KV_BLOCKS" if error.resource == "blocks" else "NO_SEQUENCE_SLOT", str(error), _RETRY_S)
        case EngineDeadError():
            return unavailable("ENGINE_DEAD", "the engine of this instance is dead", _RETRY_S)
        case HoldBrokenError():
            return aborted("HOLD_BROKEN", str(error))
        case _:
            return internal(f"the sequence failed: {error}" if isinstance(error, EngineError) else "internal error")


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turns the engine's errors that leave the block into statuses."""
    try:
        yield
    except EngineError as error:
        raise status_of(error) from error
