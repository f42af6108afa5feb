from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.served_model import ServedModel
from tandem.v1 import decode_pb2, gateway_pb2, generation_pb2
from tests.gateway.fake_decode import LENGTH, STOP, Response, hangs, says, tokens
from tests.gateway.house import WAIT_S, ask, house


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.backend.encode(text, add_special_tokens=False).ids)


def test_the_gateway_imports_no_torch() -> None:
    program = "import sys, gateway.servicer, gateway.__main__; print([m for m in ('torch', 'transformers', 'engine') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


async def test_a_completion_streams_with_seed_usage_and_trailers(model: ServedModel) -> None:
    output = ids_of(model, "The capital is Zürich 🎉.")
    eos = min(model.eos_token_ids)
    finish = generation_pb2.Finish(finish_reason=STOP, matched_token_id=eos)
    async with house(model, tokens([*output, eos], finish=finish), num_prefills=1) as h:
        messages, trailers = await h.generate(ask("What?", request_id="r-1", seed=7, temperature=0.5))
        assert "".join(message.text for message in messages) == "The capital is Zürich 🎉."
        assert [token for message in messages for token in message.token_ids] == [*output, eos]
        assert [message.position for message in messages] == list(range(len(output) + 1))
        assert (messages[0].seed, messages[0].model) == (7, "m")
        assert not any(message.HasField("finish") for message in messages[:-1])
        assert messages[-1].finish == finish
        num_prompt = len(ids_of(model, "What?"))
        assert messages[-1].usage == generation_pb2.Usage(
            prompt_tokens=num_prompt, completion_tokens=len(output) + 1, total_tokens=num_prompt + len(output) + 1, cached_tokens=3
        )
        expected = {
            "tandem-request-id": "r-1",
            "tandem-path": "handover",
            "tandem-decode-instance": "d0",
            "tandem-prefill-instance": "p0",
            "tandem-kv-transport": "inline",
            "tandem-kv-bytes": "4096",
            "tandem-tokens-sent": str(len(output) + 1),
        }
        assert {key: trailers.get(key) for key in expected} == expected
        [sent] = h.decodes[0].requests
        assert list(sent.prompt_token_ids) == ids_of(model, "What?")
        assert (sent.sampling_params.seed, sent.sampling_params.temperature, sent.prefill_instance) == (7, 0.5, "p0")
        assert sent.sampling_params.max_tokens == 512 - num_prompt
        assert h.metric("requests_total", finished_reason="stop", grpc_code="OK") == 1
        assert h.metric("generation_tokens_total") == len(output) + 1
        assert h.metric("prompt_tokens_total") == num_prompt
        assert h.metric("time_to_first_token_seconds_count") == h.metric("e2e_request_latency_seconds_count") == 1
        assert h.metric("inter_token_latency_seconds_count") == len(output)


async def test_the_last_report_of_the_prompt_counts(model: ServedModel) -> None:
    prompt = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_HANDOVER, prefill_instance="p0")
    again = decode_pb2.PromptReport(path=decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, num_failed_attempts=1)
    last = Response(token_ids=[6], position=1, prompt=again, handover=decode_pb2.HandoverReport(), finish=generation_pb2.Finish(finish_reason=LENGTH))
    async with house(model, says(Response(token_ids=[5], prompt=prompt), last), num_prefills=1) as h:
        _, trailers = await h.generate(ask("x"))
        assert (trailers["tandem-path"], trailers["tandem-kv-bytes"]) == ("local_fallback", "0")
        assert not {"tandem-prefill-instance", "tandem-kv-transport"} & trailers.keys()


async def test_a_unary_completion_is_the_stream_in_one(model: ServedModel) -> None:
    async with house(model, tokens(ids_of(model, "fine, thanks"), per_message=3)) as h:
        response = await h.stub.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=ask("How are you?")), timeout=WAIT_S)
        [choice] = response.choices
        assert (choice.text, choice.finish.finish_reason, response.model) == ("fine, thanks", LENGTH, "m")
        assert list(choice.token_ids) == ids_of(model, "fine, thanks")
        assert response.usage.completion_tokens == len(choice.token_ids)
        assert response.seed == h.decodes[0].requests[0].sampling_params.seed
        assert response.request_id == h.decodes[0].requests[0].request_id != ""


async def test_a_conversation_goes_out_by_the_models_template(model: ServedModel) -> None:
    chat = gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content="hi <|im_end|>")])
    async with house(model, tokens([5])) as h:
        await h.generate(ask(chat=chat))
        assert list(h.decodes[0].requests[0].prompt_token_ids) == model.tokenizer.encode_chat([{"role": "user", "content": "hi <|im_end|>"}])


@pytest.mark.parametrize("per_message", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_text_counts_its_tokens_and_cancels_decode(per_message: int, include: bool, model: ServedModel) -> None:
    output = ids_of(model, "one two STOP three four five six seven")
    async with house(model, tokens(output, per_message=per_message, hang=True)) as h:
        messages, _ = await h.generate(ask("go", stop=["STOP", "never"], include_stop_str_in_output=include))
        assert "".join(message.text for message in messages) == ("one two STOP" if include else "one two ")
        assert messages[-1].finish == generation_pb2.Finish(finish_reason=STOP, matched_stop_str="STOP")
        sent = [token for message in messages for token in message.token_ids]
        assert "STOP" in model.tokenizer.backend.decode(sent)
        assert "STOP" not in model.tokenizer.backend.decode(sent[:-1])
        assert messages[-1].usage.completion_tokens == len(sent)
        async with asyncio.timeout(WAIT_S):
            await h.decodes[0].idle.wait()


async def test_a_stop_string_that_only_the_last_flush_completes_is_found(model: ServedModel) -> None:
    output = ids_of(model, "ab")
    async with house(model, tokens(output)) as h:
        messages, _ = await h.generate(ask("go", stop=["b"]))
        assert ("".join(message.text for message in messages), messages[-1].finish.matched_stop_str) == ("a", "b")


async def test_held_back_text_comes_out_at_the_end(model: ServedModel) -> None:
    async with house(model, tokens(ids_of(model, "one two ST"))) as h:
        messages, _ = await h.generate(ask("go", stop=["STOP"]))
        assert ("".join(message.text for message in messages), messages[-1].finish.finish_reason) == ("one two ST", LENGTH)


async def test_a_token_that_ends_the_sequence_has_no_text_unless_asked_for(model: ServedModel) -> None:
    a, b = ids_of(model, "a")[0], ids_of(model, "b")[0]
    finish = generation_pb2.Finish(finish_reason=STOP, matched_token_id=b)
    async with house(model, tokens([a, b], finish=finish)) as h:
        for include, text in ((False, "a"), (True, "ab")):
            messages, _ = await h.generate(ask("go", stop_token_ids=[b], include_stop_str_in_output=include))
            assert "".join(message.text for message in messages) == text


async def test_a_finish_without_a_token_ends_the_stream(model: ServedModel) -> None:
    async with house(model, says(Response(finish=generation_pb2.Finish(finish_reason=LENGTH)))) as h:
        messages, _ = await h.generate(ask("go", max_tokens=0, seed=3))
        [message] = messages
        assert (message.seed, message.finish.finish_reason, message.usage.completion_tokens) == (3, LENGTH, 0)


async def test_a_resume_goes_on_behind_the_tokens_sent(model: ServedModel) -> None:
    output = ids_of(model, "one two STOP three")
    async with house(model, tokens(output[3:], first=3, hang=True)) as h:
        whole = ask("go", stop=["STOP"], output_token_ids=output[:3])
        messages, _ = await h.generate(whole)
        assert messages[0].position == 3
        before = "".join(model.tokenizer.backend.decode(output[:3]))
        assert before + "".join(message.text for message in messages) == "one two "
        assert list(h.decodes[0].requests[0].output_token_ids) == output[:3]


async def test_cached_tokens_of_a_resume_are_at_most_the_prompts(model: ServedModel) -> None:
    async with house(model, tokens([5], first=4)) as h:
        messages, _ = await h.generate(ask(token_ids=generation_pb2.TokenIds(ids=[7]), output_token_ids=[5, 5, 5, 5]))
        assert (messages[-1].usage.prompt_tokens, messages[-1].usage.cached_tokens) == (1, 1)


@pytest.mark.parametrize(("fields", "expected"), [({"max_tokens": 2}, "length"), ({"stop": ["ab"]}, "ab"), ({"stop_token_ids": True}, "token")])
async def test_a_resume_of_a_completion_that_had_ended_ends_at_once(fields: dict[str, object], expected: str, model: ServedModel) -> None:
    output = [ids_of(model, "a")[0], ids_of(model, "b")[0]]
    if "stop_token_ids" in fields:
        fields = {"stop_token_ids": [output[1]]}
    async with house(model, hangs) as h:
        messages, _ = await h.generate(ask("go", output_token_ids=output, **fields))
        [message] = messages
        finish = message.finish
        assert (finish.matched_stop_str or ("token" if finish.HasField("matched_token_id") else "length")) == expected
        assert (message.usage.completion_tokens, h.decodes[0].requests) == (2, [])
