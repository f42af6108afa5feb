"""openai-python against Tandem's HTTP door. Runs in the client's own environment, and prints the name of each use as it passes.

python clients_openai.py BASE_URL
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import openai
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionStreamOptionsParam, ChatCompletionUserMessageParam

_TIMEOUT_S = 60.0
_PROMPT = "Once upon a time"
_MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Name three colours."}]
_NO_END = {"ignore_eos": True}
_WITH_USAGE: ChatCompletionStreamOptionsParam = {"include_usage": True}
_MORE_THAN_FIT = 24
"""Streams at once; the check's gateway runs 8 and lets 8 wait."""


def passed(name: str) -> None:
    print(f"passed: {name}", flush=True)


def models(client: OpenAI, model: str) -> None:
    [found] = client.models.list().data
    assert (found.id, found.object) == (model, "model"), found
    passed("models")


def completions(client: OpenAI, model: str) -> None:
    """Whole and streamed are the same answer, and the usage comes by itself behind the last choice."""
    whole = client.completions.create(model=model, prompt=_PROMPT, max_tokens=12, temperature=0, seed=1, extra_body=_NO_END)
    assert whole.usage is not None and whole.usage.completion_tokens == 12, whole.usage
    assert whole.choices[0].finish_reason == "length", whole
    passed("completion")
    text, usages = "", []
    for chunk in client.completions.create(
        model=model, prompt=_PROMPT, max_tokens=12, temperature=0, seed=1, stream=True, stream_options=_WITH_USAGE, extra_body=_NO_END
    ):
        text += "".join(choice.text for choice in chunk.choices)
        if chunk.usage is not None:
            usages.append((len(chunk.choices), chunk.usage.completion_tokens))
    assert text == whole.choices[0].text, (text, whole.choices[0].text)
    assert usages == [(0, 12)], usages
    passed("completion, streamed, usage chunk")


def completion_parameters(client: OpenAI, model: str) -> None:
    """n, logprobs, seed, stop, echo, prompts as token ids and side by side."""
    several = client.completions.create(model=model, prompt=_PROMPT, max_tokens=8, temperature=1.2, seed=5, n=3, logprobs=2, extra_body=_NO_END)
    again = client.completions.create(model=model, prompt=_PROMPT, max_tokens=8, temperature=1.2, seed=5, n=3, logprobs=2, extra_body=_NO_END)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len(set(texts)) > 1, several
    passed("n")
    assert texts == [choice.text for choice in again.choices], (texts, again)
    passed("seed")
    for choice in several.choices:
        found = choice.logprobs
        assert found is not None, choice
        tokens, logprobs, tops = found.tokens or [], found.token_logprobs or [], found.top_logprobs or []
        assert len(tokens) == len(logprobs) == len(tops) == 8, found
        assert all(value <= 0 for value in logprobs) and all(len(top) >= 2 for top in tops), found
    passed("logprobs")
    greedy = client.completions.create(model=model, prompt=_PROMPT, max_tokens=12, temperature=0, extra_body=_NO_END).choices[0].text
    stop = greedy.split()[2]
    stopped = client.completions.create(model=model, prompt=_PROMPT, max_tokens=12, temperature=0, stop=[stop], extra_body=_NO_END).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == greedy[: greedy.index(stop)], (greedy, stop, stopped)
    passed("stop")
    echoed = client.completions.create(model=model, prompt=_PROMPT, max_tokens=4, temperature=0, echo=True, extra_body=_NO_END).choices[0].text
    assert echoed.startswith(_PROMPT) and greedy.startswith(echoed.removeprefix(_PROMPT)), (echoed, greedy)
    passed("echo")
    ids = client.completions.create(model=model, prompt=[100, 200, 300], max_tokens=4, temperature=0, extra_body=_NO_END)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3, ids
    both = client.completions.create(model=model, prompt=[_PROMPT, "The capital of France"], max_tokens=4, temperature=0, extra_body=_NO_END)
    assert [choice.index for choice in both.choices] == [0, 1] and greedy.startswith(both.choices[0].text), both
    passed("token ids, two prompts")


def chat(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=_MESSAGES, max_completion_tokens=12, temperature=0, extra_body=_NO_END)
    answer = whole.choices[0]
    assert (answer.message.role, bool(answer.message.content), answer.finish_reason) == ("assistant", True, "length"), whole
    passed("chat")
    text, roles, usages, ends = "", [], [], []
    for chunk in client.chat.completions.create(
        model=model,
        messages=_MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options=_WITH_USAGE,
        extra_body=_NO_END,
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            ends += [choice.finish_reason] if choice.finish_reason else []
        usages += [(len(chunk.choices), chunk.usage.completion_tokens)] if chunk.usage else []
    assert (text, roles, ends, usages) == (answer.message.content, ["assistant"], ["length"], [(0, 12)]), (text, roles, ends, usages)
    passed("chat, streamed, usage chunk")


def chat_parameters(client: OpenAI, model: str) -> None:
    """n, logprobs with alternatives, seed, stop, and content in parts."""
    parts: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": [{"type": "text", "text": "Name three "}, {"type": "text", "text": "colours."}]}]

    def asked(messages: list[ChatCompletionUserMessageParam]) -> list[str | None]:
        found = client.chat.completions.create(
            model=model, messages=messages, max_tokens=6, temperature=1.0, seed=9, n=2, logprobs=True, top_logprobs=3, extra_body=_NO_END
        )
        for choice in found.choices:
            assert choice.logprobs is not None and choice.logprobs.content is not None and len(choice.logprobs.content) == 6, choice
            assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content), choice
        return [choice.message.content for choice in found.choices]

    texts = asked(_MESSAGES)
    assert len(texts) == 2 and texts == asked(parts), texts
    passed("chat: n, logprobs, seed, parts")
    greedy = client.chat.completions.create(model=model, messages=_MESSAGES, max_tokens=12, temperature=0).choices[0].message.content
    assert greedy, "the answer is empty"
    stop = greedy.split()[1]
    stopped = client.chat.completions.create(model=model, messages=_MESSAGES, max_tokens=12, temperature=0, stop=stop).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == greedy[: greedy.index(stop)], (greedy, stop, stopped)
    passed("chat: stop")


def refused(call: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    """Raises AssertionError when it is not."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(client: OpenAI, model: str) -> None:
    error = refused(lambda: client.completions.create(model=model, prompt=_PROMPT, temperature=-1), openai.BadRequestError)
    assert (error.status_code, error.param, error.type, str(error.code)) == (400, "temperature", "BadRequestError", "400"), error
    error = refused(lambda: client.chat.completions.create(model=model, messages=[]), openai.BadRequestError)
    assert error.param == "messages", error.param
    error = refused(lambda: client.completions.create(model=model, prompt=_PROMPT, extra_body={"no_such_field": 1}), openai.BadRequestError)
    assert error.param == "no_such_field", error.param
    error = refused(lambda: client.completions.create(model=model, prompt=_PROMPT, temperature=9, stream=True), openai.BadRequestError)
    assert error.param == "temperature", error.param
    passed("BadRequestError names the field")
    error = refused(lambda: client.completions.create(model="no-such-model", prompt=_PROMPT), openai.NotFoundError)
    assert (error.status_code, error.type) == (404, "NotFoundError"), (error.status_code, error.type)
    passed("NotFoundError")


def cancel(client: OpenAI, model: str) -> None:
    """Closing a stream ends the request; that nothing is held then is the check's to see."""
    with client.completions.create(model=model, prompt=_PROMPT, max_tokens=1500, stream=True, extra_body=_NO_END) as stream:
        for position, _ in enumerate(stream):
            if position == 3:
                break
    passed("cancel by closing the stream")


async def asynchronous(url: str, model: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0) as client:
        assert [found.id async for found in client.models.list()] == [model]

        async def one() -> tuple[str, int]:
            text, num_tokens = "", 0
            async for chunk in await client.completions.create(
                model=model, prompt=_PROMPT, max_tokens=12, temperature=0, stream=True, stream_options=_WITH_USAGE, extra_body=_NO_END
            ):
                text += "".join(choice.text for choice in chunk.choices)
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            return text, num_tokens

        found = await asyncio.gather(one(), one(), one())
        whole = await client.completions.create(model=model, prompt=_PROMPT, max_tokens=12, temperature=0, extra_body=_NO_END)
        assert set(found) == {(whole.choices[0].text, 12)}, (found, whole)
        answer = await client.chat.completions.create(model=model, messages=_MESSAGES, max_tokens=6, temperature=0, extra_body=_NO_END)
        assert answer.usage is not None and answer.usage.completion_tokens == 6, answer
        passed("async: models, completion, three streams, chat")
        param = "nothing"
        try:
            await client.completions.create(model=model, prompt=_PROMPT, top_p=7)
        except openai.BadRequestError as error:
            param = str(error.param)
        assert param == "top_p", f"{param} was refused"
        stream = await client.chat.completions.create(model=model, messages=_MESSAGES, max_tokens=1500, stream=True, extra_body=_NO_END)
        async for _ in stream:
            break
        await stream.close()
        passed("async: BadRequestError, cancel")
        await rate_limit(client, model)


async def rate_limit(client: AsyncOpenAI, model: str) -> None:
    """More at once than run and wait: the first that is refused is told when to come back, and all others leave."""

    async def begin() -> openai.RateLimitError | None:
        try:
            async with await client.completions.create(model=model, prompt=_PROMPT, max_tokens=1000, stream=True, extra_body=_NO_END) as stream:
                async for _ in stream:
                    pass
        except openai.RateLimitError as error:
            return error
        return None

    streams = [asyncio.ensure_future(begin()) for _ in range(_MORE_THAN_FIT)]
    try:
        done, _ = await asyncio.wait(streams, timeout=_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        error = next((stream.result() for stream in done), None)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert error is not None, "nothing was refused"
    assert error.status_code == 429, error
    headers = error.response.headers
    assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) >= 1, headers
    passed("async: RateLimitError says when to come back")


def main() -> None:
    url = f"{sys.argv[1]}/v1"
    with OpenAI(base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0) as client:
        model = client.models.list().data[0].id
        for use in (models, completions, completion_parameters, chat, chat_parameters, errors, cancel):
            use(client, model)
    asyncio.run(asynchronous(url, model))
    print(f"version: {openai.__version__}")


if __name__ == "__main__":
    main()
