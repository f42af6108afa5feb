"""Which decode and which prefill instance a request goes to: by load, among those with room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gateway.instances import Instance, Role, Shape
from gateway.ledger import Ledger, num_charged_blocks


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of the pools."""

    num_prompt_tokens: int
    """Prompt, and tokens of a resume: all that must be computed."""
    max_new_tokens: int
    """Of each sample."""
    excluded: frozenset[str] = frozenset()
    """Decode instances that failed it."""
    n: int = 1
    """Samples of the one prompt."""

    def num_kv_tokens(self, decode: Instance) -> int:
        """Tokens that decode reserves."""
        reserve = decode.load.reserve_output_tokens if decode.load is not None else 0
        return self.num_prompt_tokens + self.n * min(self.max_new_tokens, reserve)

    def num_blocks(self, decode: Instance) -> int:
        """Forecast of the charge, without prefix hits."""
        assert decode.load is not None
        reserved = min(self.max_new_tokens, decode.load.reserve_output_tokens)
        return num_charged_blocks(self.num_prompt_tokens, reserved, decode.load.block_size, n=self.n)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `prefill` None: decode computes the prompt itself."""

    decode: Instance
    prefill: Instance | None

    @property
    def computing(self) -> Instance:
        """The instance that computes the prompt."""
        return self.prefill or self.decode


class Missing(Enum):
    """Why no instance can serve a request, now or ever."""

    NO_DECODE = "NO_DECODE"
    NO_PREFILL = "NO_PREFILL"
    TOO_LONG = "TOO_LONG"
    TOO_MANY_SAMPLES = "TOO_MANY_SAMPLES"


class Waiting(Enum):
    """What a request waits for."""

    KV_BLOCKS = "kv_blocks"
    KV_TOKENS = "max_total_kv_tokens"
    PREFILL_BACKLOG = "max_prefill_backlog_tokens"
    REQUESTS = "max_active_requests"
    SEQUENCES = "max_num_seqs"


class Router:
    """Looks at instances and ledger and changes neither."""

    def __init__(self, instances: Mapping[str, Instance], ledger: Ledger, *, max_prefill_backlog_tokens: int, max_total_kv_tokens: int | None = None) -> None:
        """`instances` is looked at anew each time."""
        self._instances = instances
        self._ledger = ledger
        self._max_backlog = max_prefill_backlog_tokens
        self._max_total_kv_tokens = max_total_kv_tokens

    def shapes(self) -> tuple[Shape | None, ...]:
        """All that `missing` depends on: the shapes of the available instances, None for the others."""
        return tuple(instance.shape if instance.available else None for instance in self._instances.values())

    def missing(self, demand: Demand) -> Missing | None:
        """Why waiting is of no use: a pool without an available instance, or a request that is larger than any pool."""
        decodes = [decode for decode in self._available(Role.DECODE) if decode.name not in demand.excluded]
        if not decodes:
            return Missing.NO_DECODE
        large_enough = [decode for decode in decodes if self._could_hold(demand, decode)]
        if not large_enough:
            enough_places = any(self.num_places(demand) <= decode.max_places for decode in decodes)
            return Missing.TOO_LONG if enough_places else Missing.TOO_MANY_SAMPLES
        return None if any(self.computing_for(decode) is not None for decode in large_enough) else Missing.NO_PREFILL

    def route(self, demand: Demand) -> Route | Waiting:
        """The least loaded pair with room, or what there is no room in."""
        decodes = self._with_prefill([decode for decode in self._available(Role.DECODE) if decode.name not in demand.excluded])
        with_room = [decode for decode in decodes if self._could_hold(demand, decode) and self.num_blocks(demand, decode) <= self._ledger.room(decode.name)]
        if not with_room:
            return Waiting.KV_BLOCKS
        with_place = [decode for decode in with_room if decode.has_places(self.num_places(demand))]
        if not with_place:
            return Waiting.SEQUENCES
        for decode in sorted(with_place, key=lambda d: (d.num_requests, -self._ledger.room(d.name), d.name)):
            computing = self.computing_for(decode)
            if computing is not None and computing.backlog.num_tokens <= self._max_backlog:
                return Route(decode, None if computing is decode else computing)
        return Waiting.PREFILL_BACKLOG

    def num_blocks(self, demand: Demand, decode: Instance) -> int:
        """What decode will reserve by forecast: nothing for at most one token, which comes from prefill."""
        return 0 if demand.max_new_tokens <= 1 and self._has_prefill_pool() else demand.num_blocks(decode)

    def num_places(self, demand: Demand) -> int:
        """Places of max_num_seqs that it takes there: one for each sample, once there is more than the first token, which comes from prefill."""
        return 1 if demand.max_new_tokens <= 1 and self._has_prefill_pool() else demand.n

    def computing_for(self, decode: Instance) -> Instance | None:
        """The instance to compute a prompt for `decode`: the paired prefill instance with the least backlog, decode itself when there is no prefill pool."""
        if not self._has_prefill_pool():
            return decode
        paired = [prefill for prefill in self._available(Role.PREFILL) if prefill.pairs_with(decode)]
        return min(paired, key=lambda p: (p.backlog.num_tokens, p.num_requests, p.name), default=None)

    def _has_prefill_pool(self) -> bool:
        return any(instance.role is Role.PREFILL for instance in self._instances.values())

    def _with_prefill(self, decodes: list[Instance]) -> list[Instance]:
        return [decode for decode in decodes if self.computing_for(decode) is not None]

    def _available(self, role: Role) -> list[Instance]:
        return [instance for instance in self._instances.values() if instance.role is role and instance.available]

    def _could_hold(self, demand: Demand, decode: Instance) -> bool:
        assert decode.load is not None, "an available instance has reported"
        fits_context = demand.num_prompt_tokens + demand.max_new_tokens <= decode.load.max_model_len
        fits_limit = self._max_total_kv_tokens is None or demand.num_kv_tokens(decode) <= self._max_total_kv_tokens
        fits_places = self.num_places(demand) <= decode.max_places
        return fits_context and fits_limit and fits_places and self.num_blocks(demand, decode) <= decode.load.num_blocks
