"""Our messages become OpenAI's answers: what is streamed and what comes whole say the same, in the shapes that OpenAI's own client declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.http.asked import Asked
from gateway.http.chat_request import chat_request
from gateway.http.completion_request import completion_request
from gateway.http.token_text import TokenText
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.channels import MAX_MESSAGE_BYTES
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, generation_pb2

Message = gateway_pb2.GenerateResponse
FAMILIES = ("smollm2", "qwen3", "llama3", "llama2")


def _logprob(token_id: int, others: Sequence[int] = ()) -> generation_pb2.TokenLogprob:
    top = [generation_pb2.TopLogprob(token_id=each, logprob=-0.5 - place) for place, each in enumerate((token_id, *others))]
    return generation_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, top_logprobs=top)


def _messages(model: ServedModel, texts: Sequence[str], *, logprobs: bool = False, prompt_logprobs: bool = False) -> Iterator[Message]:
    """Of samples that say one text each, a token a message, in turns."""
    told: dict[str, Any] = {"seed": 7, "model": "m", "prompt_tokens": 3}
    if prompt_logprobs:
        yield Message(request_id="r", prompt_logprobs=[_logprob(6), _logprob(7)], prompt_token_ids=[5, 6, 7], **told)
        told = {}
    encoded = [model.tokenizer.encode_text(text) for text in texts]
    for position in range(max(map(len, encoded))):
        for index, ids in enumerate(encoded):
            if position < len(ids):
                text = model.tokenizer.backend.decode(ids[: position + 1])[len(model.tokenizer.backend.decode(ids[:position])) :]
                message = Message(request_id="r", index=index, text=text, token_ids=[ids[position]], position=position, **told)
                told = {}
                if logprobs:
                    message.logprobs.append(_logprob(ids[position], (1, 2)))
                if position == len(ids) - 1:
                    message.finish.finish_reason = generation_pb2.FINISH_REASON_LENGTH if index else generation_pb2.FINISH_REASON_STOP
                    if not index:
                        message.finish.matched_stop_str = "stop"
                yield message
    total = sum(map(len, encoded))
    usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=total, total_tokens=3 + total, cached_tokens=2)
    yield Message(request_id="r", index=0, usage=usage)


def _asked(path: str, model: ServedModel, **fields: Any) -> Asked:
    if path == "chat":
        return chat_request(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), model, RequestLimits(), request_id="r")
    return completion_request(json.dumps({"prompt": "abc", **fields}).encode(), model, RequestLimits(), request_id="r")


def _run(asked: Asked, messages: Sequence[Message]) -> list[dict[str, Any]]:
    chunks = [chunk for message in messages[:-1] for chunk in asked.answer.take(0, message)]
    asked.answer.take(0, messages[-1])  # the usage alone, which has no chunk of its own in the middle
    return chunks + asked.answer.last()


def _valid(chunk: dict[str, Any]) -> Completion:
    """OpenAI's type of a completion has no null finish_reason, which its chunks have."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "content_filter"} for choice in chunk["choices"]]
    return Completion.model_validate({**chunk, "choices": choices})


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_completions_joined_are_the_whole_one(model: ServedModel, n: int) -> None:
    messages = list(_messages(model, ["Hello, world!", "naïve café", "東京"][:n], logprobs=True))
    streamed, whole = _asked("text", model, stream=True, n=n, logprobs=2), _asked("text", model, n=n, logprobs=2)
    chunks = [_valid(chunk) for chunk in _run(streamed, messages)]
    _run(whole, messages)
    answer = Completion.model_validate(whole.answer.whole())
    assert {chunk.id for chunk in chunks} == {answer.id} == {"cmpl-r"}
    for choice in answer.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts][-1] == choice.finish_reason
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in parts for each in getattr(part.logprobs, name)] == getattr(choice.logprobs, name)


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_chats_joined_are_the_whole_one(model: ServedModel, n: int) -> None:
    messages = list(_messages(model, ["Hello, 🎉 world!", "привет"][:n], logprobs=True))
    streamed, whole = _asked("chat", model, stream=True, n=n, logprobs=True, top_logprobs=2), _asked("chat", model, n=n, logprobs=True, top_logprobs=2)
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in _run(streamed, messages)]
    _run(whole, messages)
    answer = ChatCompletion.model_validate(whole.answer.whole())
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in answer.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert parts[0].delta.content == ""
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts][-1] == choice.finish_reason
        assert choice.logprobs is not None
        assert [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()] == choice.logprobs.content


def test_usage_is_a_chunk_of_its_own_behind_all_others_and_null_in_them(model: ServedModel) -> None:
    messages = list(_messages(model, ["Hello there"]))
    *others, last = _run(_asked("text", model, stream=True, stream_options={"include_usage": True}), messages)
    assert last["choices"] == []
    usage = {"prompt_tokens": 3, "completion_tokens": len(messages) - 1, "total_tokens": len(messages) + 2, "prompt_tokens_details": {"cached_tokens": 2}}
    assert last["usage"] == usage
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert "usage" not in _run(_asked("text", model, stream=True), messages)[0]


def test_continuous_usage_counts_up(model: ServedModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = _run(_asked("chat", model, stream=True, stream_options=options), list(_messages(model, ["Hello there"])))
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted[1:-1] == list(range(1, len(counted) - 1))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_what_matched_is_told_as_vllm_tells_it(model: ServedModel) -> None:
    messages = list(_messages(model, ["Hi", "Ho"]))
    asked = _asked("text", model, n=2)
    _run(asked, messages)
    first, second = asked.answer.whole()["choices"]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", "stop")
    assert (second["finish_reason"], second["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompts_log_probabilities_in_front(model: ServedModel, stream: bool) -> None:
    asked = _asked("text", model, stream=stream, echo=True, logprobs=0)
    messages = list(_messages(model, ["Hi there"], logprobs=True, prompt_logprobs=True))
    chunks = _run(asked, messages)
    choice = (chunks[0] if stream else asked.answer.whole())["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][:3] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    text = TokenText(model.tokenizer.vocabulary)
    assert logprobs["tokens"][:3] == [text.name_of(each) for each in (5, 6, 7)]
    assert logprobs["text_offset"] == [sum(len(text.text_of(each)) for each in (5, 6, 7, 8)[:place]) for place in range(3)] + logprobs["text_offset"][3:]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_one_token_has_it_in_front(model: ServedModel, stream: bool) -> None:
    asked = _asked("text", model, stream=stream, echo=True, logprobs=0)
    message = Message(text="a b", token_ids=[9], logprobs=[_logprob(9)], prompt_token_ids=[5], prompt_tokens=1, seed=7)
    message.finish.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    chunks = asked.answer.take(0, message)
    logprobs = (chunks[0] if stream else asked.answer.whole())["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.5]
    assert {len(column) for column in logprobs.values()} == {2}


@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_echo_whose_prompt_is_asked_about_by_itself_is_told_about_it_by_itself(model: ServedModel, logprobs: int | None) -> None:
    asked = _asked("text", model, echo=True, prompt_logprobs=0, logprobs=logprobs)
    _run(asked, list(_messages(model, ["Hi there"], logprobs=logprobs is not None, prompt_logprobs=True)))
    choice = asked.answer.whole()["choices"][0]
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, ["6"], ["7"]]
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert len({len(column) for column in choice["logprobs"].values()}) == 1


def test_prompt_logprobs_without_an_echo_come_in_vllms_shape(model: ServedModel) -> None:
    messages = list(_messages(model, ["Hi"], prompt_logprobs=True))
    for path in ("text", "chat"):
        asked = _asked(path, model, prompt_logprobs=0)
        _run(asked, messages)
        whole = asked.answer.whole()
        told = whole["prompt_logprobs"] if path == "chat" else whole["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        assert [list(entry) for entry in told[1:]] == [["6"], ["7"]]


def test_choices_of_several_prompts_are_numbered_through(model: ServedModel) -> None:
    asked = completion_request(json.dumps({"prompt": ["a", "b"], "n": 2}).encode(), model, RequestLimits(), request_id="r")
    for prompt in (1, 0):
        for message in _messages(model, [f"Hello {prompt}", f"How {prompt}"]):
            asked.answer.take(prompt, message)
    whole = Completion.model_validate(asked.answer.whole())
    assert [(choice.index, choice.text.strip()) for choice in whole.choices] == [(0, "Hello 0"), (1, "How 0"), (2, "Hello 1"), (3, "How 1")]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 6


def test_a_sample_that_the_server_gave_up_is_an_error(model: ServedModel) -> None:
    message = Message(request_id="r", text="x", token_ids=[5], finish=generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_ABORT))
    with pytest.raises(StatusError, match="gave the sample up"):
        _asked("chat", model, stream=True).answer.take(0, message)


def test_a_whole_answer_is_bounded(model: ServedModel) -> None:
    asked = _asked("text", model)
    piece = Message(request_id="r", text="x" * (1 << 20))
    for _ in range(MAX_MESSAGE_BYTES // (1 << 20) - 1):
        asked.answer.take(0, piece)
    with pytest.raises(StatusError, match="MiB"):
        asked.answer.take(0, piece)


def test_the_bound_of_a_whole_answer_is_that_of_all_its_prompts(model: ServedModel) -> None:
    asked = completion_request(json.dumps({"prompt": ["a", "b"]}).encode(), model, RequestLimits(), request_id="r")
    piece = Message(request_id="r", text="x" * (1 << 20))
    for turn in range(MAX_MESSAGE_BYTES // (1 << 20) - 1):
        asked.answer.take(turn % 2, piece)
    with pytest.raises(StatusError, match="MiB"):
        asked.answer.take(1, piece)


def test_tokens_and_positions_are_told_when_asked_for(model: ServedModel) -> None:
    messages = list(_messages(model, ["Hello there"]))
    asked = _asked("text", model, return_token_ids=True)
    _run(asked, messages)
    whole = asked.answer.whole()
    assert whole["choices"][0]["token_ids"] == [each for message in messages for each in message.token_ids]
    assert whole["seed"] == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_tokens_are_those_of_the_text(models: dict[str, ServedModel], family: str) -> None:
    model = models[family]
    text = TokenText(model.tokenizer.vocabulary)
    said = "Hello, 東京タワー naïve 🎉🎊 x\n\n  y ¡"
    ids = model.tokenizer.backend.encode(said, add_special_tokens=False).ids
    joined = b"".join(text.bytes_of(each) for each in ids)
    assert joined.decode().strip() == said
    assert any(text.name_of(each).startswith("bytes:") for each in ids) or family == "llama2" or all(text.bytes_of(each).decode() for each in ids)


def test_tokens_with_other_bytes_have_other_names(model: ServedModel) -> None:
    text = TokenText(model.tokenizer.vocabulary)
    names = [text.name_of(each) for each in range(model.vocab_size) if text.bytes_of(each)]
    assert len(set(names)) == len(names)
