"""What a request must be before anything is done for it. Nothing is ignored: a refusal is INVALID_ARGUMENT with the field's full name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.limits import RequestLimits
from gateway.sampling_checks import check_sampling, raise_if, token_ids_problem
from gateway.served_model import ServedModel
from rpc.errors import invalid_argument, not_found
from tandem.v1 import gateway_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def is_request_id(text: str, max_chars: int) -> bool:
    """Whether a request may be named so."""
    return len(text) <= max_chars and _REQUEST_ID.fullmatch(text) is not None


def check_request(request: gateway_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits) -> None:
    """Checks everything that needs no tokenizing. Raises StatusError."""
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise invalid_argument("request_id", "must be 1 to 128 letters, digits and . _ : - and begin with a letter or a digit")
    if request.model and request.model != model.name:
        raise not_found("MODEL_NOT_FOUND", f"model {request.model[:128]!r} is not served; {model.name!r} is")
    _check_input(request, model, limits)
    check_sampling(request.sampling_params, model, limits)
    _check_resume(request, model)


def _check_input(request: gateway_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits) -> None:
    match request.WhichOneof("input"):
        case "text":
            raise_if("text", "must not be empty" if not request.text else _too_many_chars(len(request.text), model))
        case "token_ids":
            ids = request.token_ids.ids
            raise_if("token_ids.ids", "must not be empty" if not ids else _ids_problem(ids, model))
        case "chat":
            _check_messages(request.chat.messages, model, limits)
        case _:
            raise invalid_argument("input", "must be set: text, token_ids or chat")


def _check_messages(messages: Sequence[gateway_pb2.ChatMessage], model: ServedModel, limits: RequestLimits) -> None:
    if not messages:
        raise invalid_argument("chat.messages", "must not be empty")
    if len(messages) > limits.max_messages:
        raise invalid_argument("chat.messages", f"must be at most {limits.max_messages} messages, is {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid_argument(f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    raise_if("chat.messages", _too_many_chars(sum(len(message.content) for message in messages), model))


def _check_resume(request: gateway_pb2.GenerateRequest, model: ServedModel) -> None:
    if not request.output_token_ids:
        return
    raise_if("output_token_ids", _ids_problem(request.output_token_ids, model))
    if request.sampling_params.n > 1:
        raise invalid_argument("output_token_ids", f"is of one sample; n is {request.sampling_params.n}")


def _too_many_chars(num_chars: int, model: ServedModel) -> str | None:
    limit = model.max_model_len * model.longest_token_chars
    return None if num_chars <= limit else f"is {num_chars} characters, which is above what {model.max_model_len} tokens can hold ({limit})"


def _ids_problem(ids: Sequence[int], model: ServedModel) -> str | None:
    """Counts first: a message can hold tens of millions, and a look at each would stall the event loop."""
    if len(ids) > model.max_model_len:
        return f"is {len(ids)} tokens, above the context of {model.max_model_len}"
    return token_ids_problem(ids, model.vocab_size)
