"""A PrefillStart, checked: what to compute and how it will be read."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine.proto import kv_layout_from_proto, sampling_params_from_proto, token_ids_from_proto
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.errors import NoTransportError
from kvtransfer.transport import KvSource, choose_source
from prefill_svc.pool import PrefillPool
from rpc.errors import failed_precondition, invalid_argument
from tandem.v1 import prefill_pb2
from worker.statuses import engine_errors


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that may be posted to the engine."""

    spec: SequenceSpec
    num_cached_blocks: int
    """Leading blocks that decode has already."""
    num_blocks: int
    source: KvSource | None
    """How decode reads; None: it wants the first token only."""


def check_prompt(start: prefill_pb2.PrefillStart, pool: PrefillPool) -> Prompt:
    """Raises StatusError: FAILED_PRECONDITION for pools that do not pair, INVALID_ARGUMENT naming the field. Nothing has been computed."""
    _check_layout(start, pool)
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
    source = _choose(start, pool)
    if source is not None and sampling.max_tokens == 0:
        raise invalid_argument("transports", "must be empty when max_tokens is 0: there is nothing to hand over for")
    num_blocks = -(-num_tokens // model.layout.block_size)
    if start.num_cached_blocks > num_blocks:
        raise invalid_argument("num_cached_blocks", f"is {start.num_cached_blocks}, the prompt has {num_blocks}")
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
    return Prompt(spec, start.num_cached_blocks, num_blocks, source)


def _check_layout(start: prefill_pb2.PrefillStart, pool: PrefillPool) -> None:
    differences = pool.engine.model.layout.differences(kv_layout_from_proto(start.layout))
    if differences:
        texts = {name: f"prefill has {own}, decode has {other}" for name, (own, other) in differences.items()}
        raise failed_precondition(f"KV layouts differ in {', '.join(texts)}", texts)


def _choose(start: prefill_pb2.PrefillStart, pool: PrefillPool) -> KvSource | None:
    if not start.transports:
        return None
    try:
        _, source = choose_source(start.transports, start.process_id, pool.sources)
    except NoTransportError as error:
        raise failed_precondition(str(error), {"transports": ", ".join(start.transports)[:256]}, reason="NO_TRANSPORT") from error
    return source
