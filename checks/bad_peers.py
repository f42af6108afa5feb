"""What a wrong gateway can send to a decode worker, and a wrong decode worker to prefill: refused like a client's mistakes, whoever has checked before."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from checks.refusals import DECODE_GENERATE, PAIR, PREFILL, READ_KV, WRITE_KV, BadInput, Code, Facts, Make, bytes_field
from tandem.v1 import kv_pb2
from tandem.v1.decode_pb2 import DecodeServiceGenerateRequest
from tandem.v1.generation_pb2 import SamplingParams, TokenIds
from tandem.v1.prefill_pb2 import Copied, PairChoice, PairRequest, PairStart, PrefillRequest, PrefillStart, ReadKvRequest, WriteKvRequest

_PARAMS = "sampling_params."
_PAIRED_S = 3600.0
Build = Callable[[Facts], dict[str, Any]]
Request = Callable[[Facts, dict[str, Any]], Any]
"""A good message but for the given fields; those that it has not are its sampling parameters'."""


def _decode(facts: Facts, fields: dict[str, Any]) -> Any:
    return DecodeServiceGenerateRequest(**_with_params({"request_id": "r", "prompt_token_ids": [1, 2, 3]} | fields, DecodeServiceGenerateRequest))


def _prefill(facts: Facts, fields: dict[str, Any]) -> Any:
    given = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "pairing_id": facts.pairing_id, "transport": "inline"} | fields
    return PrefillRequest(start=PrefillStart(**_with_params(given, PrefillStart)))


def _pair(facts: Facts, fields: dict[str, Any]) -> Any:
    good: dict[str, Any] = {"layout": facts.layout, "process_id": "another", "boot_id": "another", "transports": ["inline"], "nonce": bytes(32)}
    return PairRequest(start=PairStart(**good | fields))


@asynccontextmanager
async def open_pairing(prefill: Any, facts: Facts) -> AsyncIterator[str]:
    """A pairing as another process's, by its id, that lasts as long as the block."""
    call = prefill.Pair(timeout=_PAIRED_S)
    try:
        await call.write(_pair(facts, {}))
        yield (await call.read()).pairing_id
    finally:
        call.cancel()


def _with_params(fields: dict[str, Any], message: Any) -> dict[str, Any]:
    own = {name: fields.pop(name) for name in tuple(fields) if name in message.DESCRIPTOR.fields_by_name}
    params = {name: value for name, value in ({"max_tokens": 4, "seed": 1, "temperature": 0.0} | fields).items() if value is not None}
    return {"sampling_params": SamplingParams(**params)} | own


def _given(**fields: Any) -> Build:
    return lambda _: fields


def _bytes(raw: bytes) -> Make:
    return lambda _: raw


def _made(request: Request, build: Build) -> Make:
    return lambda facts: request(facts, build(facts)).SerializeToString()


_BAD_PARAMS: tuple[tuple[str, str, Build], ...] = (
    ("no seed", "seed", _given(seed=None)),
    ("no max_tokens", "max_tokens", _given(max_tokens=None)),
    *((f"temperature {value}", "temperature", _given(temperature=value)) for value in (math.nan, math.inf, -1.0)),
    *((f"top_p {value}", "top_p", _given(top_p=value)) for value in (math.nan, 0.0, 1.5)),
    *((f"min_p {value}", "min_p", _given(min_p=value)) for value in (math.nan, -0.5, 1.5)),
    *((f"presence_penalty {value}", "presence_penalty", _given(presence_penalty=value)) for value in (math.nan, 3.0)),
    *((f"frequency_penalty {value}", "frequency_penalty", _given(frequency_penalty=value)) for value in (math.inf, -3.0)),
    *((f"repetition_penalty {value}", "repetition_penalty", _given(repetition_penalty=value)) for value in (math.nan, math.inf, 0.0)),
    ("top_k -2", "top_k", _given(top_k=-2)),
    ("n 0", "n", _given(n=0)),
    ("n over the limit", "n", lambda facts: {"n": facts.limits.max_samples + 1}),
    ("min_tokens over max_tokens", "min_tokens", _given(min_tokens=5)),
    ("logprobs over the limit", "logprobs", lambda facts: {"logprobs": facts.limits.max_logprobs + 1}),
    ("prompt_logprobs over the limit", "prompt_logprobs", lambda facts: {"prompt_logprobs": facts.limits.max_logprobs + 1}),
    ("stop token over the vocabulary", "stop_token_ids", lambda facts: {"stop_token_ids": [facts.vocab_size]}),
    ("allowed token over the vocabulary", "allowed_token_ids", lambda facts: {"allowed_token_ids": [facts.vocab_size]}),
    ("bias of NaN", "logit_bias", _given(logit_bias={1: math.nan})),
    ("bias of a token over the vocabulary", "logit_bias", lambda facts: {"logit_bias": {facts.vocab_size: 1.0}}),
    ("too many biases", "logit_bias", lambda facts: {"logit_bias": dict.fromkeys(range(facts.limits.max_logit_biases + 1), 1.0)}),
    ("bad words as text", "bad_words", _given(bad_words=["x"])),
    ("empty run of bad words", "bad_words_ids", _given(bad_words_ids=[TokenIds()])),
    ("bad word over the vocabulary", "bad_words_ids", lambda facts: {"bad_words_ids": [TokenIds(ids=[facts.vocab_size])]}),
)
_BAD_PROMPTS: tuple[tuple[str, str, Build], ...] = (
    ("no prompt", "prompt_token_ids", _given(prompt_token_ids=[])),
    ("prompt over the context", "prompt_token_ids", lambda facts: {"prompt_token_ids": [1] * (facts.max_model_len + 1)}),
    ("prompt over the vocabulary", "prompt_token_ids", lambda facts: {"prompt_token_ids": [1, facts.vocab_size]}),
    ("resume over the vocabulary", "output_token_ids", lambda facts: {"output_token_ids": [facts.vocab_size]}),
    ("resume that is at its end", "output_token_ids", _given(output_token_ids=[1, 1, 1, 1])),
    ("resume of n samples", "output_token_ids", _given(output_token_ids=[1], n=2)),
)


def _at_both() -> Iterator[BadInput]:
    for door, path, request in (("decode", DECODE_GENERATE, _decode), ("prefill", PREFILL, _prefill)):
        for what, name, build in _BAD_PARAMS:
            yield BadInput(f"{door}: {what}", _PARAMS + name, _made(request, build), field=_PARAMS + name, path=path)
        for what, name, build in _BAD_PROMPTS:
            yield BadInput(f"{door}: {what}", name, _made(request, build), field=name, path=path)
        yield BadInput(f"{door}: bytes at random", "", _bytes(bytes(range(255, 0, -1))), field="request", path=path)
        cut = request(Facts("", 1, 1), {}).SerializeToString()[:-3]
        yield BadInput(f"{door}: a cut message", "", _bytes(cut), field="request", path=path)


def _at_decode() -> Iterator[BadInput]:
    for name in ("nobody", "127.0.0.1:1", "p" * 10_000):
        make = _made(_decode, _given(prefill_instance=name))
        what = f"decode: prefill instance {name[:20]}"
        yield BadInput(what, "prefill_instance", make, Code.FAILED_PRECONDITION, reason="UNKNOWN_INSTANCE", path=DECODE_GENERATE)
    not_utf8 = bytes_field(1, b"a\xff")
    yield BadInput("decode: request id that is not UTF-8", "request_id", _bytes(not_utf8), field="request", path=DECODE_GENERATE)


def _other_layout(field: str) -> Build:
    def build(facts: Facts) -> dict[str, Any]:
        layout = kv_pb2.KvLayout()
        layout.CopyFrom(facts.layout)
        value = getattr(layout, field)
        setattr(layout, field, f"{value}x" if isinstance(value, str) else value + 1)
        return {"layout": layout}

    return build


def _at_pair() -> Iterator[BadInput]:
    row = BadInput("", "layout", _bytes(b""), Code.FAILED_PRECONDITION, reason="LAYOUT_MISMATCH", path=PAIR)
    for field in kv_pb2.KvLayout.DESCRIPTOR.fields:
        if field.name != "block_size":  # what copying converts
            yield replace(row, name=f"pair: another {field.name}", make=_made(_pair, _other_layout(field.name)))
    yield replace(row, name="pair: no layout", make=_made(_pair, _given(layout=None)))
    row = BadInput("", "", _bytes(b""), path=PAIR)
    yield replace(row, name="pair: an empty message", field="step")
    choice = PairRequest(choice=PairChoice(transport="inline")).SerializeToString()
    yield replace(row, name="pair: a choice before anything", make=_bytes(choice), field="step")
    for what, name, fields in (
        ("no nonce", "nonce", {"nonce": b""}),
        ("a nonce of a megabyte", "nonce", {"nonce": bytes(1 << 20)}),
        ("no transports", "transports", {"transports": []}),
        ("a transport without a name", "transports", {"transports": [""]}),
        ("a hundred transports", "transports", {"transports": ["inline"] * 100}),
        ("a long process id", "process_id", {"process_id": "p" * 10_000}),
        ("a long boot id", "boot_id", {"boot_id": "b" * 10_000}),
        ("a long device", "device_uuid", {"device_uuid": "d" * 10_000}),
        ("staging beyond memory", "nixl_staging", {"nixl_staging": kv_pb2.NixlStaging(base_address=2**64 - 1, num_slots=2, slot_bytes=1)}),
        ("an agent of a megabyte", "nixl_staging", {"nixl_staging": kv_pb2.NixlStaging(agent_metadata=bytes(1 << 20))}),
    ):
        yield replace(row, name=f"pair: {what}", about=name, make=_made(_pair, _given(**fields)), field=f"start.{name}")
    yield replace(row, name="pair: bytes at random", make=_bytes(bytes(range(255, 0, -1))), field="request")


def _at_prefill() -> Iterator[BadInput]:
    row = BadInput("", "pairing_id", _bytes(b""), Code.FAILED_PRECONDITION, reason="PAIRING_UNKNOWN", path=PREFILL)
    for pairing_id in ("", "0" * 32, "0" * 10_000):
        yield replace(row, name=f"prefill: pairing {pairing_id[:40]}, {len(pairing_id)} digits", make=_made(_prefill, _given(pairing_id=pairing_id)))
    row = BadInput("", "", _bytes(b""), path=PREFILL)
    for transport in ("pigeon", "memory", "shared_memory"):
        make = _made(_prefill, _given(transport=transport))
        yield replace(row, name=f"prefill: by {transport}, which was not offered", about="transport", make=make, field="transport")
    yield replace(row, name="prefill: an empty message", field="step")
    copied = PrefillRequest(copied=Copied(hold_id="x", num_blocks=1)).SerializeToString()
    yield replace(row, name="prefill: Copied before anything", make=_bytes(copied), field="step")
    nothing = _made(_prefill, _given(max_tokens=0))
    yield replace(row, name="prefill: a transport for no token", about="transport", make=nothing, field="transport")
    cached = _made(_prefill, _given(num_cached_tokens=2**32 - 1))
    yield replace(row, name="prefill: more cached tokens than the prompt has", about="num_cached_tokens", make=cached, field="num_cached_tokens")


def _at_transfers() -> Iterator[BadInput]:
    row = BadInput("", "hold_id", _bytes(b""), Code.FAILED_PRECONDITION)
    for path, door, request in ((READ_KV, "read", _read), (WRITE_KV, "write", _write)):
        for what, fields, about, reason in (
            ("no pairing", {"pairing_id": ""}, "pairing_id", "PAIRING_UNKNOWN"),
            ("an unknown pairing", {"pairing_id": "0" * 32}, "pairing_id", "PAIRING_UNKNOWN"),
            ("an unknown hold", {"hold_id": "0" * 32, "num_blocks": 1}, "hold_id", "HOLD_UNKNOWN"),
            ("a hold of a megabyte", {"hold_id": "0" * (1 << 20), "num_blocks": 2**32 - 1}, "hold_id", "HOLD_UNKNOWN"),
        ):
            named = reason if path == READ_KV or about == "pairing_id" else "NO_TRANSPORT"
            yield replace(row, name=f"{door}: {what}", about=about, make=_made(request, _given(**fields)), reason=named, path=path)
        yield BadInput(f"{door}: bytes at random", "", _bytes(bytes(range(255, 0, -1))), field="request", path=path)


def _read(facts: Facts, fields: dict[str, Any]) -> Any:
    return ReadKvRequest(**{"pairing_id": facts.pairing_id} | fields)


def _write(facts: Facts, fields: dict[str, Any]) -> Any:
    return WriteKvRequest(**{"pairing_id": facts.pairing_id} | fields)


BAD_PEERS: tuple[BadInput, ...] = (*_at_both(), *_at_decode(), *_at_pair(), *_at_prefill(), *_at_transfers())
