"""A copy counts only when prefill's RPC ends OK and names the hold that was copied; with any other end it is thrown away, and no token is wrong (rule 2)."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from kvtransfer.hold import CONFIRMED, Hold
from prefill_svc import conversation
from rpc.errors import StatusError, aborted
from tandem.v1 import decode_pb2
from tests.support.alone import alone
from tests.support.cluster import open_cluster

PROMPT = list(range(100, 130))


def _says_nothing(talk: conversation.Conversation, hold: Hold) -> None:
    talk._context.set_trailing_metadata(())


def _names_another(talk: conversation.Conversation, hold: Hold) -> None:
    talk._context.set_trailing_metadata(((CONFIRMED, hold.hold_id[::-1]),))


def _names_two(talk: conversation.Conversation, hold: Hold) -> None:
    talk._context.set_trailing_metadata(((CONFIRMED, "0" * 32), (CONFIRMED, hold.hold_id)))


def _fails_behind_it(talk: conversation.Conversation, hold: Hold) -> None:
    raise aborted("HOLD_BROKEN", "the blocks were not held without a break")


def _change_end(monkeypatch: pytest.MonkeyPatch, change: Callable[[conversation.Conversation, Hold], None]) -> None:
    confirm = conversation.Conversation._confirm

    async def changed(talk: conversation.Conversation, hold: Hold) -> None:
        await confirm(talk, hold)
        change(talk, hold)

    monkeypatch.setattr(conversation.Conversation, "_confirm", changed)


@pytest.mark.parametrize("change", [_says_nothing, _names_another, _names_two, _fails_behind_it])
async def test_an_end_that_does_not_confirm_the_hold_throws_the_copy_away(
    change: Callable[[conversation.Conversation, Hold], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_end(monkeypatch, change)
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)
        paths = [(report.path, report.num_failed_attempts) for report in answer.prompts]
        assert paths == [(decode_pb2.PROMPT_PATH_HANDOVER, 0), (decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, 1)]
        assert not any(message.handover.num_blocks for message in answer.messages), "a copy that was not confirmed is told as one"
        await cluster.assert_nothing_held()


async def test_a_reservation_that_finds_no_room_asks_prefill_for_nothing() -> None:
    async with open_cluster(decode_options={"num_blocks": 8}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(cluster.request(PROMPT))
        assert StatusError.of(failed.value).code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        await cluster.assert_nothing_held()
        assert (await cluster.prefills[0].engine.report()).computed_prompt_tokens == 0
