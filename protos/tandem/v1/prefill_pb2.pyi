from tandem.v1 import generation_pb2 as _generation_pb2
from tandem.v1 import kv_pb2 as _kv_pb2
from tandem.v1 import load_pb2 as _load_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PairRequest(_message.Message):
    __slots__ = ("start", "choice")
    START_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    start: PairStart
    choice: PairChoice
    def __init__(self, start: _Optional[_Union[PairStart, _Mapping]] = ..., choice: _Optional[_Union[PairChoice, _Mapping]] = ...) -> None: ...

class PairStart(_message.Message):
    __slots__ = ("layout", "process_id", "boot_id", "device_uuid", "transports", "nonce", "nixl_staging")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NIXL_STAGING_FIELD_NUMBER: _ClassVar[int]
    layout: _kv_pb2.KvLayout
    process_id: str
    boot_id: str
    device_uuid: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    nonce: bytes
    nixl_staging: _kv_pb2.NixlStaging
    def __init__(self, layout: _Optional[_Union[_kv_pb2.KvLayout, _Mapping]] = ..., process_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., device_uuid: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., nonce: _Optional[bytes] = ..., nixl_staging: _Optional[_Union[_kv_pb2.NixlStaging, _Mapping]] = ...) -> None: ...

class PairChoice(_message.Message):
    __slots__ = ("transport", "bytes_per_s")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    transport: str
    bytes_per_s: float
    def __init__(self, transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("pairing_id", "layout", "nonce", "num_blocks", "probe_bytes", "probe_digest", "sources", "refusals")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAIRING_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    pairing_id: str
    layout: _kv_pb2.KvLayout
    nonce: bytes
    num_blocks: int
    probe_bytes: int
    probe_digest: int
    sources: _containers.RepeatedCompositeFieldContainer[_kv_pb2.KvSource]
    refusals: _containers.ScalarMap[str, str]
    def __init__(self, pairing_id: _Optional[str] = ..., layout: _Optional[_Union[_kv_pb2.KvLayout, _Mapping]] = ..., nonce: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., probe_bytes: _Optional[int] = ..., probe_digest: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_kv_pb2.KvSource, _Mapping]]] = ..., refusals: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "copied")
    START_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    copied: Copied
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., copied: _Optional[_Union[Copied, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request_id", "tenant_salt", "pairing_id", "prompt_token_ids", "output_token_ids", "sampling_params", "num_cached_tokens", "transport", "priority", "sample_index", "checksum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PAIRING_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_salt: bytes
    pairing_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _generation_pb2.SamplingParams
    num_cached_tokens: int
    transport: str
    priority: int
    sample_index: int
    checksum: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., pairing_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., transport: _Optional[str] = ..., priority: _Optional[int] = ..., sample_index: _Optional[int] = ..., checksum: _Optional[bool] = ...) -> None: ...

class Copied(_message.Message):
    __slots__ = ("hold_id", "num_blocks")
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hold_id: str
    num_blocks: int
    def __init__(self, hold_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("kv_ready", "done", "prompt_logprobs")
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    kv_ready: _kv_pb2.KvReady
    done: PrefillDone
    prompt_logprobs: PromptLogprobs
    def __init__(self, kv_ready: _Optional[_Union[_kv_pb2.KvReady, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: _generation_pb2.TokenLogprob
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[_generation_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("first_tokens", "cached_tokens", "computed_tokens", "num_blocks", "queue_s", "prefill_s", "hold_id")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_tokens: int
    computed_tokens: int
    num_blocks: int
    queue_s: float
    prefill_s: float
    hold_id: str
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., hold_id: _Optional[str] = ...) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("pairing_id", "hold_id", "first_block", "num_blocks")
    PAIRING_ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pairing_id: str
    hold_id: str
    first_block: int
    num_blocks: int
    def __init__(self, pairing_id: _Optional[str] = ..., hold_id: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class WriteKvRequest(_message.Message):
    __slots__ = ("pairing_id", "hold_id", "first_block", "num_blocks", "slot", "grant")
    PAIRING_ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    pairing_id: str
    hold_id: str
    first_block: int
    num_blocks: int
    slot: int
    grant: int
    def __init__(self, pairing_id: _Optional[str] = ..., hold_id: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., slot: _Optional[int] = ..., grant: _Optional[int] = ...) -> None: ...

class WriteKvResponse(_message.Message):
    __slots__ = ("slot", "grant", "digests")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    grant: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., grant: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadKvResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class PrefillServiceWatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceWatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _load_pb2.LoadReport
    def __init__(self, load: _Optional[_Union[_load_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class PrefillServiceGetMemoryReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceGetMemoryReportResponse(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: _load_pb2.MemoryReport
    def __init__(self, memory: _Optional[_Union[_load_pb2.MemoryReport, _Mapping]] = ...) -> None: ...
