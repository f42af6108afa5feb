"""tandem_client as its users have it: from the wheel, in an environment that has what the client needs and nothing else of Tandem's needs.

    python clients_tandem.py HOST:PORT

Prints the name of each use as it passes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

from tandem_client import AsyncClient, ChatMessage, Client, Completion, DeadlineExceeded, FinishReason, InvalidRequest, ModelNotFound, TandemError

_PROMPT = "Once upon a time"
_MESSAGES: list[ChatMessage] = [{"role": "user", "content": "Name three colours."}]
_NOT_HERE = ("torch", "numpy", "transformers", "tokenizers", "pydantic", "starlette", "aiohttp")


def passed(name: str) -> None:
    print(f"passed: {name}", flush=True)


def alone() -> None:
    here = [name for name in _NOT_HERE if find_spec(name) is not None]
    assert not here, f"{here} are installed: this shows nothing"
    passed("needs grpcio, protobuf and googleapis-common-protos alone")


def generate(client: Client) -> None:
    [model] = client.models()
    assert model.max_model_len > 0, model
    assert client.status().instances, "no instances"
    passed("models, status")
    whole = client.generate(_PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert len(whole.token_ids) == 12, whole
    assert whole.finish.reason is FinishReason.LENGTH, whole
    passed("generate")
    with client.stream(_PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True) as stream:
        text = "".join(piece.text for piece in stream)
        assert (text, stream.usage.completion_tokens) == (whole.text, 12), (text, stream.usage)
    passed("stream")
    assert client.chat(_MESSAGES, max_tokens=8).text, "an empty answer"
    passed("chat")
    several = client.generate(_PROMPT, n=2, logprobs=2, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    assert [len(choice.logprobs) for choice in several.choices] == [6, 6], several
    passed("n, logprobs, seed")


def errors(client: Client) -> None:
    refused: dict[type[TandemError], Callable[[], object]] = {
        InvalidRequest: lambda: client.generate(_PROMPT, temperature=-1.0),
        ModelNotFound: lambda: client.generate(_PROMPT, model="no-such-model"),
        DeadlineExceeded: lambda: client.generate(_PROMPT, max_tokens=1500, ignore_eos=True, timeout_s=0.5),
    }
    for kind, call in refused.items():
        met: TandemError | None = None
        try:
            call()
        except TandemError as error:
            met = error
        assert type(met) is kind, f"{met!r} instead of {kind.__name__}"
    passed("InvalidRequest, ModelNotFound, DeadlineExceeded")


def cancel(client: Client) -> None:
    with client.stream(_PROMPT, max_tokens=1500, ignore_eos=True) as stream:
        next(iter(stream))
    passed("cancel by leaving the stream")


async def asynchronous(address: str) -> None:
    async with AsyncClient(address, timeout_s=60.0) as client:

        async def one() -> Completion:
            return await client.generate(_PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)

        answers = await asyncio.gather(one(), one(), one())
        assert len({answer.text for answer in answers}) == 1, answers
        async with client.stream_chat(_MESSAGES, max_tokens=1500, ignore_eos=True) as stream:
            async for _ in stream:
                break
    passed("asyncio: side by side, cancel")


def main() -> None:
    alone()
    with Client(sys.argv[1], timeout_s=60.0) as client:
        for use in (generate, errors, cancel):
            use(client)
    asyncio.run(asynchronous(sys.argv[1]))
    print(f"version: {metadata.version('tandem-serve')}")


if __name__ == "__main__":
    main()
