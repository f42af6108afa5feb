from tandem.v1 import generation_pb2 as _generation_pb2
from tandem.v1 import load_pb2 as _load_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PromptPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROMPT_PATH_UNSPECIFIED: _ClassVar[PromptPath]
    PROMPT_PATH_HANDOVER: _ClassVar[PromptPath]
    PROMPT_PATH_LOCAL: _ClassVar[PromptPath]
    PROMPT_PATH_LOCAL_FALLBACK: _ClassVar[PromptPath]
    PROMPT_PATH_PREFILL_ONLY: _ClassVar[PromptPath]
PROMPT_PATH_UNSPECIFIED: PromptPath
PROMPT_PATH_HANDOVER: PromptPath
PROMPT_PATH_LOCAL: PromptPath
PROMPT_PATH_LOCAL_FALLBACK: PromptPath
PROMPT_PATH_PREFILL_ONLY: PromptPath

class DecodeServiceGenerateRequest(_message.Message):
    __slots__ = ("request_id", "tenant_salt", "prompt_token_ids", "output_token_ids", "sampling_params", "priority", "prefill_instance", "sample_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant_salt: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _generation_pb2.SamplingParams
    priority: int
    prefill_instance: str
    sample_index: int
    def __init__(self, request_id: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., prefill_instance: _Optional[str] = ..., sample_index: _Optional[int] = ...) -> None: ...

class DecodeServiceGenerateResponse(_message.Message):
    __slots__ = ("reservation", "token_ids", "logprobs", "position", "prompt", "handover", "finish", "index", "prompt_logprobs")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    position: int
    prompt: PromptReport
    handover: HandoverReport
    finish: _generation_pb2.Finish
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., position: _Optional[int] = ..., prompt: _Optional[_Union[PromptReport, _Mapping]] = ..., handover: _Optional[_Union[HandoverReport, _Mapping]] = ..., finish: _Optional[_Union[_generation_pb2.Finish, _Mapping]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("num_charged_blocks", "num_blocks", "cached_tokens")
    NUM_CHARGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_charged_blocks: int
    num_blocks: int
    cached_tokens: int
    def __init__(self, num_charged_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PromptReport(_message.Message):
    __slots__ = ("path", "prefill_instance", "cached_tokens", "num_failed_attempts")
    PATH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    path: PromptPath
    prefill_instance: str
    cached_tokens: int
    num_failed_attempts: int
    def __init__(self, path: _Optional[_Union[PromptPath, str]] = ..., prefill_instance: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., num_failed_attempts: _Optional[int] = ...) -> None: ...

class HandoverReport(_message.Message):
    __slots__ = ("transport", "kv_bytes", "num_blocks", "transfer_s", "exposed_s", "hidden_s")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    transport: str
    kv_bytes: int
    num_blocks: int
    transfer_s: float
    exposed_s: float
    hidden_s: float
    def __init__(self, transport: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., hidden_s: _Optional[float] = ...) -> None: ...

class DecodeServiceWatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceWatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _load_pb2.LoadReport
    def __init__(self, load: _Optional[_Union[_load_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class DecodeServiceGetMemoryReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceGetMemoryReportResponse(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: _load_pb2.MemoryReport
    def __init__(self, memory: _Optional[_Union[_load_pb2.MemoryReport, _Mapping]] = ...) -> None: ...
