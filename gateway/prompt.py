"""A request's input as tokens and as text, with the event loop left free when it is long."""

from __future__ import annotations

from gateway.bad_words import bad_words_runs, check_number_of_runs
from gateway.chat_template import ChatTemplateError
from gateway.limits import RequestLimits
from gateway.prompt_ids import TooManyTokensError
from gateway.resolved_request import ResolvedRequest
from gateway.tokenizer import TextTokenizer
from rpc.errors import invalid_argument
from tandem.v1 import gateway_pb2


async def prompt_token_ids(request: gateway_pb2.GenerateRequest, tokenizer: TextTokenizer, *, max_tokens: int) -> list[int]:
    """The input's token ids. Raises StatusError for a conversation that the template refuses, and for more than `max_tokens`."""
    form = request.WhichOneof("input")
    try:
        match form:
            case "text":
                return await tokenizer.encode_text_async(request.text, max_tokens=max_tokens)
            case "chat":
                messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
                return await tokenizer.encode_chat_async(messages, max_tokens=max_tokens)
            case _:
                return list(request.token_ids.ids)
    except ChatTemplateError as error:
        raise invalid_argument("chat.messages" if error.index is None else f"chat.messages[{error.index}].content", str(error)) from None
    except TooManyTokensError as error:
        raise invalid_argument("chat.messages" if form == "chat" else "text", str(error)) from None


async def bad_words_ids(request: gateway_pb2.GenerateRequest, tokenizer: TextTokenizer, limits: RequestLimits) -> list[list[int]]:
    """The runs of token ids that the request's bad words are. Raises StatusError."""
    words = list(request.sampling_params.bad_words)
    # Each is tokenized twice.
    runs = await tokenizer.off_the_loop(2 * sum(map(len, words)), lambda: bad_words_runs(words, tokenizer.backend, limits))
    check_number_of_runs(len(request.sampling_params.bad_words_ids), len(runs), limits)
    return runs


def echoed_text(request: gateway_pb2.GenerateRequest, resolved: ResolvedRequest, tokenizer: TextTokenizer) -> str:
    """What stands in front of each sample's text: nothing without echo, or in a resume, whose first stream had it."""
    if not resolved.echo or resolved.output_token_ids:
        return ""
    if request.WhichOneof("input") == "text":
        return request.text
    return tokenizer.backend.decode(list(resolved.prompt_token_ids), skip_special_tokens=resolved.skip_special_tokens)
