"""A resumed stream's text behind the text that was sent is the uncut one's, wherever the cut came."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.completion import Completion
from gateway.served_model import ServedModel
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2
from tests.gateway.house import ask
from tests.gateway.test_validation import resolved

_TEXT = "Zürich 🎉 안녕 👨‍👩‍👧‍👦 STOP, or STO"
_FAMILIES = ("smollm2", "llama2")
"""One that spells characters in parts of tokens, one that spells them in byte tokens."""
_LENGTH = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_LENGTH)


def _take(completion: Completion, ids: Sequence[int], finish: generation_pb2.Finish | None) -> list[gateway_pb2.GenerateResponse]:
    """What the client gets when decode sends one token a message, from where the completion stands, and `finish` with the last."""
    found: list[gateway_pb2.GenerateResponse] = []
    for position in range(completion.num_tokens, len(ids)):
        message = decode_pb2.DecodeServiceGenerateResponse(token_ids=[ids[position]], position=position)
        if finish is not None and position == len(ids) - 1:
            message.finish.CopyFrom(finish)
        response = completion.take(message)
        assert response is not None
        found.append(response)
        if completion.finished:
            break
    return found


def _text(messages: Sequence[gateway_pb2.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def _assert_no_cut_shows(model: ServedModel, ids: Sequence[int], finish: generation_pb2.Finish, **fields: object) -> None:
    """Cuts behind each token, also behind the last one, when the message that would have ended the sample did not come."""
    uncut = _take(Completion(0, resolved(ask("x", **fields), model), model), ids, finish)
    seen = _take(Completion(0, resolved(ask("x", **fields), model), model), ids, None)
    for cut in range(1, len(seen) + 1):
        if seen[cut - 1].HasField("finish"):
            break
        sent = [token_id for message in seen[:cut] for token_id in message.token_ids]
        resumed = Completion(0, resolved(ask("x", output_token_ids=sent, **fields), model), model)
        rest = [resumed.ended_message()] if resumed.finished else _take(resumed, ids, finish)
        assert _text(seen[:cut]) + _text(rest) == _text(uncut), cut
        assert (rest[-1].finish, rest[-1].index) == (uncut[-1].finish, 0), cut
        assert resumed.num_tokens == sum(len(message.token_ids) for message in uncut), cut


@pytest.fixture(params=_FAMILIES)
def any_model(request: pytest.FixtureRequest, models: dict[str, ServedModel]) -> ServedModel:
    return models[request.param]


def _ids(model: ServedModel, text: str = _TEXT) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


def test_a_cut_inside_a_character_shows_nowhere(any_model: ServedModel) -> None:
    ids = _ids(any_model)
    assert len(ids) > len(_TEXT), "characters are more than one token"
    _assert_no_cut_shows(any_model, ids, _LENGTH, max_tokens=len(ids))
    for length in range(1, len(ids)):  # half a character at the end is told as U+FFFD, and once
        _assert_no_cut_shows(any_model, ids[:length], _LENGTH, max_tokens=length)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 30])
@pytest.mark.parametrize("stop", [["STOP"], ["or STOP"], ["🎉 안녕"], ["🎉 안X", "👨‍👩", "STO"], ["STOP, or STOP"]])
def test_a_cut_inside_a_half_seen_stop_string_shows_nowhere(any_model: ServedModel, stop: list[str], min_tokens: int, include: bool) -> None:
    ids = _ids(any_model)
    fields = {"max_tokens": len(ids), "min_tokens": min_tokens, "stop": stop, "include_stop_str_in_output": include}
    _assert_no_cut_shows(any_model, ids, _LENGTH, **fields)


def test_held_text_comes_out_behind_a_cut_that_took_the_end(any_model: ServedModel) -> None:
    ids, eos = _ids(any_model, "one STO"), min(any_model.eos_token_ids)
    ended = generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_token_id=eos)
    _assert_no_cut_shows(any_model, [*ids, eos], ended, stop=["STOP"])
    resumed = Completion(0, resolved(ask("x", output_token_ids=[*ids, eos], stop=["STOP"]), any_model), any_model)
    assert (resumed.ended_message().text, resumed.ended_message().finish) == ("STO", ended)
