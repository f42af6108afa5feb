"""The configured workers: a channel to each, its load as it reports it, and whether requests may go there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import grpc

from gateway.instances import Instance, Role
from gateway.served_model import ServedModel
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, load_pb2, prefill_pb2, prefill_pb2_grpc

_LOG = logging.getLogger(__name__)
_BACKOFF_S = (0.1, 0.2, 0.4, 0.5)


@dataclass(frozen=True, slots=True)
class Peer:
    """One entry of the settings: a name and where it listens."""

    name: str
    target: str
    role: Role


class Pools:
    """Watches every instance until stopped. On the event loop only."""

    def __init__(self, peers: list[Peer], model: ServedModel, changed: Callable[[Instance], None]) -> None:
        """`changed` is called after each report and each loss of an instance. Names are unique over both pools."""
        self.instances: Mapping[str, Instance] = {peer.name: Instance(peer.name, peer.role) for peer in peers}
        self._peers = peers
        self._model = model
        self._changed = changed
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens channels and begins to watch; returns at once."""
        for peer in self._peers:
            self._channels[peer.name] = control_channel(peer.target)
            self._watches.append(asyncio.create_task(self._watch(peer), name=f"watch {peer.name}"))

    async def stop(self) -> None:
        """Ends the watches and closes the channels."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def decode_channel(self, name: str) -> grpc.aio.Channel:
        """The channel to a decode instance."""
        return self._channels[name]

    def max_model_len(self) -> int:
        """Longest sequence that the gateway's model and any reachable decode instance take, in tokens."""
        lengths = [i.load.max_model_len for i in self.instances.values() if i.role is Role.DECODE and i.available and i.load is not None]
        return min(self._model.max_model_len, max(lengths, default=self._model.max_model_len))

    def missing(self) -> str:
        """Why the gateway can serve nothing; empty when it can."""
        usable = {i.role for i in self.instances.values() if i.available}
        lacking = [role.value for role in Role if any(i.role is role for i in self.instances.values()) and role not in usable]
        return f"no {' and no '.join(lacking)} instance is available" if lacking else ""

    async def _watch(self, peer: Peer) -> None:
        instance, num_failures = self.instances[peer.name], 0
        while True:
            try:
                async for load in _reports(peer.role, self._channels[peer.name]):
                    num_failures = 0
                    self._report(instance, load)
                reason = "its load stream ended"
            except grpc.aio.AioRpcError as error:
                reason = f"no load report: {error.code().name} {(error.details() or '')[:200]}".rstrip()
            except Exception as error:  # a watch that ended in silence would leave the instance for ever as it was last seen
                _LOG.exception("watching %s instance %s failed", peer.role.value, peer.name)
                reason = f"its load report cannot be used: {type(error).__name__}"
            if instance.available or num_failures == 0:
                _LOG.warning("%s instance %s is not available: %s", peer.role.value, peer.name, reason)
            instance.lose(reason)
            self._changed(instance)
            await asyncio.sleep(_BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
            num_failures += 1

    def _report(self, instance: Instance, load: load_pb2.LoadReport) -> None:
        before = instance.reason
        instance.report(load, _mismatch(self._model, load))
        if instance.reason != before:
            _LOG.info("%s instance %s is %s", instance.role.value, instance.name, instance.reason or "available")
        self._changed(instance)


def _mismatch(model: ServedModel, load: load_pb2.LoadReport) -> str:
    """Why an instance's model cannot be the gateway's."""
    if load.vocab_size != model.vocab_size:
        return f"its vocabulary has {load.vocab_size} tokens, the gateway's tokenizer {model.vocab_size}"
    if frozenset(load.eos_token_ids) != model.eos_token_ids:
        return f"its end-of-sequence tokens are {sorted(load.eos_token_ids)}, the gateway's {sorted(model.eos_token_ids)}"
    if load.block_size == 0 or load.num_blocks == 0:
        return "it reports no blocks"
    return ""


async def _reports(role: Role, channel: grpc.aio.Channel) -> AsyncIterator[load_pb2.LoadReport]:
    if role is Role.DECODE:
        call = decode_pb2_grpc.DecodeServiceStub(channel).WatchLoad(decode_pb2.DecodeServiceWatchLoadRequest())
    else:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).WatchLoad(prefill_pb2.PrefillServiceWatchLoadRequest())
    try:
        async for response in call:
            yield response.load
    finally:
        call.cancel()
