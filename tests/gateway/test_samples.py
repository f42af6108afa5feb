"""Several samples of one prompt, and what is told of the prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import grpc
import pytest

from gateway.served_model import ServedModel
from rpc.errors import StatusError, exhausted
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2
from tests.gateway.fake_decode import LENGTH, STOP, Response, fails, samples, says, tokens
from tests.gateway.house import WAIT_S, ask, house


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


def by_sample(messages: list[gateway_pb2.GenerateResponse]) -> dict[int, list[gateway_pb2.GenerateResponse]]:
    found: dict[int, list[gateway_pb2.GenerateResponse]] = defaultdict(list)
    for message in messages:
        if not message.prompt_logprobs:
            found[message.index].append(message)
    return found


def text_of(messages: list[gateway_pb2.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def usage(num_prompt: int, num_completion: int) -> generation_pb2.Usage:
    return generation_pb2.Usage(prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion)


async def test_samples_stream_side_by_side_each_with_its_positions_and_finish(model: ServedModel) -> None:
    outputs = [ids_of(model, text) for text in ("one 🎉", "the second, which is longer", "x")]
    async with house(model, samples(*outputs)) as h:
        messages, trailers = await h.generate(ask("What?", n=3, seed=5))
        for index, got in by_sample(messages).items():
            assert [token for message in got for token in message.token_ids] == outputs[index]
            assert [message.position for message in got] == list(range(len(outputs[index])))
            assert text_of(got) == model.tokenizer.backend.decode(outputs[index])
            assert [message.HasField("finish") for message in got] == [False] * (len(got) - 1) + [True]
        num_tokens = sum(map(len, outputs))
        assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
        assert messages[-1].usage == usage(len(ids_of(model, "What?")), num_tokens)
        assert [message.HasField("seed") for message in messages] == [True] + [False] * (len(messages) - 1)
        assert (h.decodes[0].requests[0].sampling_params.n, trailers["tandem-tokens-sent"]) == (3, str(num_tokens))
        assert h.metric("generation_tokens_total") == num_tokens
        assert h.metric("inter_token_latency_seconds_count") == num_tokens - 3
        assert h.metric("request_time_per_output_token_seconds_count") == 2, "one a sample that has a gap"
        assert h.metric("prompt_tokens_total") == len(ids_of(model, "What?"))
        assert h.metric("requests_total", finished_reason="length", grpc_code="OK") == 1


async def test_a_stop_string_ends_its_own_sample_and_the_last_one_ends_the_call(model: ServedModel) -> None:
    outputs = [ids_of(model, "a STOP and on and on"), ids_of(model, "never"), ids_of(model, "later than that comes STOP here")]
    async with house(model, samples(*outputs, hang=frozenset({0, 2}))) as h:
        messages, _ = await h.generate(ask("go", n=3, stop=["STOP"]))
        got = by_sample(messages)
        assert [text_of(got[index]) for index in range(3)] == ["a ", "never", "later than that comes "]
        reasons = [(message.index, message.finish.finish_reason, message.finish.matched_stop_str) for message in messages if message.HasField("finish")]
        assert sorted(reasons) == [(0, STOP, "STOP"), (1, LENGTH, ""), (2, STOP, "STOP")]
        sent = [token for message in messages for token in message.token_ids]
        assert messages[-1].usage.completion_tokens == len(sent) < sum(map(len, outputs))
        assert "STOP" in model.tokenizer.backend.decode([token for message in got[0] for token in message.token_ids])
        async with asyncio.timeout(WAIT_S):
            await h.decodes[0].idle.wait()


async def test_a_unary_answer_has_a_choice_per_sample(model: ServedModel) -> None:
    outputs = [ids_of(model, "first"), ids_of(model, "and a second")]
    async with house(model, samples(*outputs, prompt_logprobs=[2, 1])) as h:
        request = ask(token_ids=generation_pb2.TokenIds(ids=[5, 6, 7, 8]), n=2, prompt_logprobs=0, echo=True)
        response = await h.stub.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=request), timeout=WAIT_S)
        prompt = model.tokenizer.backend.decode([5, 6, 7, 8])
        assert [(choice.index, choice.text) for choice in response.choices] == [(0, prompt + "first"), (1, prompt + "and a second")]
        assert [list(choice.token_ids) for choice in response.choices] == outputs
        assert [choice.finish.finish_reason for choice in response.choices] == [LENGTH, LENGTH]
        assert response.usage == usage(4, sum(map(len, outputs)))
        assert ([entry.token_id for entry in response.prompt_logprobs], list(response.prompt_token_ids)) == ([6, 7, 8], [5, 6, 7, 8])


async def test_echo_puts_the_prompt_in_front_of_each_sample_and_tells_its_tokens_once(model: ServedModel) -> None:
    outputs = [ids_of(model, " one"), ids_of(model, " two")]
    async with house(model, samples(*outputs)) as h:
        messages, _ = await h.generate(ask("Prompt <|im_end|>", n=2, echo=True))
        assert [text_of(got) for got in by_sample(messages).values()] == ["Prompt <|im_end|> one", "Prompt <|im_end|> two"], "the given text, as it was given"
        told = [list(message.prompt_token_ids) for message in messages]
        assert told == [list(h.decodes[0].requests[0].prompt_token_ids)] + [[]] * (len(messages) - 1)
    async with house(model, tokens([outputs[0][1]], first=1)) as h:
        messages, _ = await h.generate(ask("Prompt", echo=True, output_token_ids=outputs[0][:1]))
        assert not text_of(messages).startswith("Prompt"), "a resumed stream has had it"


async def test_echo_without_a_token_is_the_prompt(model: ServedModel) -> None:
    async with house(model, says(Response(finish=generation_pb2.Finish(finish_reason=LENGTH)))) as h:
        [message], _ = await h.generate(ask("only this", echo=True, max_tokens=0))
        assert (message.text, message.finish.finish_reason) == ("only this", LENGTH)
        assert h.metric("prompt_tokens_total") == message.usage.prompt_tokens > 0


async def test_log_probabilities_of_the_prompt_come_in_order_in_front_of_the_tokens(model: ServedModel) -> None:
    ids = list(range(10, 20))
    async with house(model, samples([5], prompt_logprobs=[4, 5])) as h:
        messages, _ = await h.generate(ask(token_ids=generation_pb2.TokenIds(ids=ids), prompt_logprobs=0, echo=True))
        assert [entry.token_id for message in messages for entry in message.prompt_logprobs] == ids[1:]
        assert [len(message.prompt_logprobs) for message in messages] == [4, 5, 0]
        assert (messages[0].HasField("seed"), list(messages[0].prompt_token_ids), messages[0].text) == (True, ids, "")
        assert text_of(messages) == model.tokenizer.backend.decode(ids) + model.tokenizer.backend.decode([5])


@pytest.mark.parametrize("lengths", [[], [8], [9, 1]])
async def test_log_probabilities_of_the_prompt_that_do_not_cover_it_are_our_fault(lengths: list[int], model: ServedModel) -> None:
    async with house(model, samples([5], prompt_logprobs=lengths)) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask(token_ids=generation_pb2.TokenIds(ids=range(10, 20)), prompt_logprobs=1))
        assert failed.value.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    "messages",
    [
        [Response(index=2, token_ids=[5])],
        [Response(index=1, token_ids=[5], position=1)],
        [Response(token_ids=[5], finish=generation_pb2.Finish(finish_reason=LENGTH)), Response(token_ids=[5], position=1)],
        [Response(token_ids=[5], finish=generation_pb2.Finish(finish_reason=LENGTH))],
        [Response(prompt_logprobs=[generation_pb2.TokenLogprob()])],
        [Response(token_ids=[5] * 9)],
        [Response(token_ids=[5], logprobs=[generation_pb2.TokenLogprob()])],
        [Response(token_ids=[5], finish=generation_pb2.Finish())],
        [Response.FromString(Response(token_ids=[5]).SerializeToString() + b"\x3a\x02\x08\x4d")],
    ],
)
async def test_what_no_sample_can_have_is_our_fault(messages: list[Response], model: ServedModel) -> None:
    async with house(model, says(*messages)) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask("x", n=2, max_tokens=8))
        assert failed.value.code is grpc.StatusCode.INTERNAL
        assert h.metric("requests_total", finished_reason="error", grpc_code="INTERNAL") == 1


async def test_tokens_without_the_log_probabilities_that_were_asked_for_are_our_fault(model: ServedModel) -> None:
    async with house(model, samples([5, 6])) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask("x", logprobs=1))
        assert failed.value.code is grpc.StatusCode.INTERNAL


async def test_a_report_behind_the_last_finish_is_heard_and_not_told(model: ServedModel) -> None:
    last = Response(token_ids=[5], finish=generation_pb2.Finish(finish_reason=LENGTH))
    report = Response(handover=decode_pb2.HandoverReport(transport="inline", kv_bytes=77))
    async with house(model, says(last, report)) as h:
        messages, trailers = await h.generate(ask("x"))
        assert (len(messages), trailers["tandem-kv-bytes"]) == (1, "77")


async def test_nothing_is_told_twice_when_room_runs_out_behind_the_prompt(model: ServedModel) -> None:
    told = Response(prompt_logprobs=[generation_pb2.TokenLogprob(token_id=6)])
    async with house(model, fails(exhausted("NO_KV_BLOCKS", "no", None), after=says(told))) as h:
        with pytest.raises(StatusError) as failed:
            await h.generate(ask(token_ids=generation_pb2.TokenIds(ids=[5, 6]), prompt_logprobs=0))
        assert (failed.value.reason, len(h.decodes[0].requests)) == ("NO_KV_BLOCKS", 1)


async def test_more_samples_than_decode_can_run_are_refused_by_name(model: ServedModel) -> None:
    async with house(model, samples([5], [6]), max_num_seqs=2) as h:
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x", n=3))
        assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.n")
        await h.generate(ask("x", n=2))


async def test_stop_strings_do_not_stop_within_the_first_tokens(model: ServedModel) -> None:
    output = ids_of(model, "ab ab ab")
    async with house(model, tokens(output)) as h:
        for min_tokens in range(len(output) + 1):
            messages, _ = await h.generate(ask("go", stop=["ab"], min_tokens=min_tokens, include_stop_str_in_output=True))
            ends = [count for count in range(min_tokens + 1, len(output) + 1) if model.tokenizer.backend.decode(output[:count]).endswith("ab")]
            expected = model.tokenizer.backend.decode(output[: ends[0]]) if ends else "ab ab ab"
            assert (text_of(messages), messages[-1].finish.matched_stop_str) == (expected, "ab" if ends else "")
            assert messages[-1].usage.completion_tokens == (ends[0] if ends else len(output))


async def test_words_that_may_not_be_said_go_out_as_tokens(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h:
        await h.generate(ask("x", bad_words=["France", "!"]))
        sent = h.decodes[0].requests[0].sampling_params
        runs = [list(run.ids) for run in sent.bad_words_ids]
        assert list(sent.bad_words) == []
        for text in ("France", " France", "!", " !"):
            assert ids_of(model, text) in runs
        for words, field in ((["x" * 200], "bad_words[0]"), (["a", "東" * 64], "bad_words[1]")):
            with pytest.raises(StatusError) as refused:
                await h.generate(ask("x", bad_words=words))
            assert refused.value.field == f"sampling_params.{field}"
        with pytest.raises(StatusError) as refused:
            await h.generate(ask("x", bad_words=["France"] * 128, bad_words_ids=[[1]] * 200))
        assert refused.value.field == "sampling_params.bad_words"


@pytest.mark.parametrize("word", [" ", "\n", "\n\n", "\t "])
async def test_white_space_that_may_not_be_said_is_no_other_white_space(word: str, model: ServedModel) -> None:
    async with house(model, tokens([5])) as h:
        await h.generate(ask("x", bad_words=[word]))
        assert [list(run.ids) for run in h.decodes[0].requests[0].sampling_params.bad_words_ids] == [ids_of(model, word)]
