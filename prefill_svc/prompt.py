"""A PrefillStart, checked: what to compute and how it will be read."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine.proto import sampling_params_from_proto, token_ids_from_proto
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.transport import KvSource
from prefill_svc.pairings import OpenPairing
from prefill_svc.pool import PrefillPool
from rpc.errors import invalid_argument
from tandem.v1 import prefill_pb2
from worker.statuses import engine_errors


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that may be posted to the engine."""

    spec: SequenceSpec
    pairing_id: str
    first_block: int
    """The first block that decode needs: the ones in front of it hold nothing but tokens that it has."""
    num_blocks: int
    source: KvSource | None
    """How decode reads; None: it wants the first token only."""
    checksum: bool
    """Each block is announced with its digest."""


def check_prompt(start: prefill_pb2.PrefillStart, pool: PrefillPool, pairing: OpenPairing) -> Prompt:
    """Raises StatusError INVALID_ARGUMENT naming the field. Nothing has been computed."""
    model = pool.engine.model
    num_tokens = len(start.prompt_token_ids) + len(start.output_token_ids)
    if num_tokens > model.max_model_len:  # in front of anything that takes time in proportion to it
        raise invalid_argument("prompt_token_ids", f"{num_tokens} tokens are over max_model_len ({model.max_model_len})")
    with engine_errors():
        sampling = sampling_params_from_proto(start.sampling_params, vocab_size=model.vocab_size, sample_index=start.sample_index)
        prompt = token_ids_from_proto(start.prompt_token_ids, vocab_size=model.vocab_size, field="prompt_token_ids")
        output = token_ids_from_proto(start.output_token_ids, vocab_size=model.vocab_size, field="output_token_ids")
    if not prompt:
        raise invalid_argument("prompt_token_ids", "must not be empty")
    if sampling.max_tokens and len(output) >= sampling.max_tokens:
        raise invalid_argument("output_token_ids", f"holds {len(output)} tokens, max_tokens is {sampling.max_tokens}")
    if output and sampling.n > 1:
        raise invalid_argument("output_token_ids", f"are those of one sample, n is {sampling.n}")
    source = _source(start, pairing)
    if source is not None and sampling.max_tokens == 0:
        raise invalid_argument("transport", "must be empty when max_tokens is 0: there is nothing to hand over for")
    if start.num_cached_tokens > num_tokens:
        raise invalid_argument("num_cached_tokens", f"is {start.num_cached_tokens}, the prompt has {num_tokens}")
    block_size = model.layout.block_size
    num_blocks = -(-num_tokens // block_size)
    first_block = start.num_cached_tokens // block_size if start.num_cached_tokens < num_tokens else num_blocks
    spec = SequenceSpec(
        seq_id=f"{start.request_id[:64]}#{secrets.token_hex(8)}",
        prompt_token_ids=prompt,
        sampling=sampling,
        kind=SequenceKind.PREFILL_ONLY,
        output_token_ids=output,
        tenant_salt=start.tenant_salt,
        priority=start.priority,
        hold=source is not None,
        reader_id=secrets.token_hex(8) if source is not None else "",
    )
    return Prompt(spec, start.pairing_id, first_block, num_blocks, source, start.checksum)


def _source(start: prefill_pb2.PrefillStart, pairing: OpenPairing) -> KvSource | None:
    if start.transport and start.transport not in pairing.offered:
        raise invalid_argument("transport", "is none that the pairing was offered")
    return pairing.offered.get(start.transport)
