"""Decode's side of one Prefill RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from decode_svc.failures import PAIRING_UNKNOWN
from decode_svc.paired import Paired
from decode_svc.peers import PrefillPeer
from decode_svc.prompt_logprobs import PromptLogprobs
from kvtransfer.errors import HandoverProtocolError, TransferError
from kvtransfer.handover import Handover
from kvtransfer.hold import CONFIRMED
from rpc.client import outgoing
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2
from telemetry.spans import PREFILL_INSTANCE, RPC_RESPONSE_STATUS_CODE

_METHOD = "tandem.v1.PrefillService/Prefill"


class PrefillCall:
    """The conversation: start, announcements, PrefillDone, Copied, the confirming end. Raises AioRpcError and HandoverError."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call = call
        self._answer: asyncio.Future[Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Prefill has ended the RPC, and with it the hold."""
        return self._call.done()

    async def start(self, start: prefill_pb2.PrefillStart) -> None:
        await self._write(prefill_pb2.PrefillRequest(start=start))

    async def done(self, handover: Handover | None, logprobs: PromptLogprobs) -> prefill_pb2.PrefillDone:
        """Passes announcements on to the hand-over, and log probabilities to their list, until the prompt is computed; a read that fails ends the waiting."""
        while True:
            response: Any = await (handover.guard(self._call.read()) if handover else self._call.read())
            step = "" if response is grpc.aio.EOF else response.WhichOneof("step")
            if step == "done":
                done: prefill_pb2.PrefillDone = response.done
                return done
            if step == "prompt_logprobs":
                logprobs.take(response.prompt_logprobs.logprobs)
            elif step == "kv_ready" and handover is not None:
                handover.announce(response.kv_ready)
            else:
                raise HandoverProtocolError(f"prefill sent {step or 'its end'} before PrefillDone")

    async def copied(self, handover: Handover) -> int:
        """Waits until all blocks have been read and returns their number; the end of the RPC in the meantime ends the waiting."""
        self._answer = asyncio.ensure_future(self._call.read())
        return await handover.covered(unless=self._answer)

    async def confirm(self, hold_id: str, num_blocks: int) -> None:
        """Behind `copied`. Returns only when the RPC has ended OK and with prefill's word that the blocks were held all the while."""
        await self._write(prefill_pb2.PrefillRequest(copied=prefill_pb2.Copied(hold_id=hold_id, num_blocks=num_blocks)))
        assert self._answer is not None
        if await self._answer is not grpc.aio.EOF:
            raise HandoverProtocolError("prefill went on after its last message")
        if dict(await self._call.trailing_metadata() or ()).get(CONFIRMED) != hold_id:
            raise HandoverProtocolError("prefill did not confirm the hold")

    async def end(self) -> None:
        """Waits for the RPC's own end: anything but OK is an error."""
        if await self._call.read() is not grpc.aio.EOF:
            raise HandoverProtocolError("prefill went on after its last message")

    def cancel(self) -> None:
        """Ends the RPC if it has not ended, and with it prefill's hold. No await."""
        self._call.cancel()
        if self._answer is not None:
            self._answer.cancel()
            self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    async def _write(self, request: prefill_pb2.PrefillRequest) -> None:
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:
            # The RPC has ended already, and its status says why.
            await self.end()
            raise HandoverProtocolError("prefill ended the call too early") from None


@contextmanager
def prefill_call(peer: PrefillPeer, paired: Paired, timeout_s: float) -> Iterator[PrefillCall]:
    """Opens the RPC under its CLIENT span; leaving the block cancels it if it has not ended, and with it prefill's hold.

    The pairing is told of what fails by its transport's fault, and of being unknown to prefill.
    """
    with outgoing(_METHOD, attributes={PREFILL_INSTANCE: peer.name}) as (metadata, handle):
        call = PrefillCall(peer.stub.Prefill(timeout=timeout_s, metadata=metadata))
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            if StatusError.of(error).reason == PAIRING_UNKNOWN:
                paired.lose("prefill knows no such pairing any more")
            raise
        except TransferError as error:
            if not call.has_ended:  # else its blocks went with the hold
                paired.transfer_failed(error)
            raise
        finally:
            if not call.has_ended:
                handle.set_attribute(RPC_RESPONSE_STATUS_CODE, grpc.StatusCode.CANCELLED.name)
            call.cancel()
