"""What a request held is gone when it is: nothing waits for a full collection, which may be a long time coming."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from gateway.http.asked import Asked
from gateway.http.body_reader import HeldBody
from gateway.http.errors import HttpError
from gateway.served_model import ServedModel
from rpc.errors import StatusError, unavailable
from tests.gateway.fake_decode import FakeDecode, Request, Script, hangs, tokens
from tests.gateway.house import House, house
from tests.gateway.http.open_door import OpenDoor, events_of, open_door
from tests.gateway.http.test_server_ends import connect, leave, request_bytes


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _keeps_a_body(each: object) -> bool:
    """It is one or was made of one, or it is an error that has such in its frames."""
    kind = type(each)  # isinstance would have lazy modules speak
    return kind in (HeldBody, Asked) or (kind in (HttpError, StatusError) and getattr(each, "__traceback__", None) is not None)


async def _fails(_: FakeDecode, __: Request, ___: Any) -> None:
    raise unavailable("HANDOVER_FAILED", "no", 0.1)


def _refused(path: str = "/v1/completions", **body: Any) -> Callable[[House, OpenDoor], Coroutine[Any, Any, None]]:
    async def run(_: House, door: OpenDoor) -> None:
        assert (await door.error(path, **body))[0] >= 400

    return run


async def _streamed(_: House, door: OpenDoor) -> None:
    async with door.post(stream=True) as response:
        await events_of(response)


async def _whole(_: House, door: OpenDoor) -> None:
    await door.completion(prompt=["a", "b"])


async def _left_in_decode(h: House, door: OpenDoor) -> None:
    _, writer = await connect(door)
    writer.write(request_bytes())
    await h.until(lambda: h.decodes[0].num_running == 1)
    await leave(writer)
    await h.until(lambda: door.counted("/v1/completions", 499) == 1)


_ENDS: dict[str, tuple[Callable[[House, OpenDoor], Coroutine[Any, Any, None]], Script]] = {
    "it is no JSON": (_refused(raw=b"{"), _fails),
    "it is no JSON, for the tokenizer": (_refused("/tokenize", raw=b"{"), _fails),
    "a field is unknown": (_refused(y=1), _fails),
    "the core refuses it": (_refused(n=99), _fails),
    "nobody serves its path": (_refused("/v1/nothing"), _fails),
    "decode fails": (_refused(), _fails),
    "decode fails one of two": (_refused(prompt=["a", "b"]), _fails),
    "its client leaves": (_left_in_decode, hangs),
    "it is answered whole": (_whole, tokens([5])),
    "it is streamed": (_streamed, tokens([5])),
}


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("how", _ENDS)
async def test_a_request_leaves_no_cycle_behind_when(how: str, model: ServedModel) -> None:
    end, script = _ENDS[how]
    async with house(model, script) as h, open_door(h) as door:
        await end(h, door)
        await h.until(lambda: not any(map(_keeps_a_body, gc.get_objects())))
