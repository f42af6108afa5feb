from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size", "version", "num_head_shards")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_HEAD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    version: int
    num_head_shards: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., version: _Optional[int] = ..., num_head_shards: _Optional[int] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("memory", "inline", "shared_memory", "cuda_ipc", "nixl")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    memory: MemorySource
    inline: InlineSource
    shared_memory: SharedMemorySource
    cuda_ipc: CudaIpcSource
    nixl: NixlSource
    def __init__(self, memory: _Optional[_Union[MemorySource, _Mapping]] = ..., inline: _Optional[_Union[InlineSource, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemorySource, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcSource, _Mapping]] = ..., nixl: _Optional[_Union[NixlSource, _Mapping]] = ...) -> None: ...

class MemorySource(_message.Message):
    __slots__ = ("pool_id",)
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    def __init__(self, pool_id: _Optional[str] = ...) -> None: ...

class InlineSource(_message.Message):
    __slots__ = ("chunk_bytes",)
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk_bytes: int
    def __init__(self, chunk_bytes: _Optional[int] = ...) -> None: ...

class SharedMemorySource(_message.Message):
    __slots__ = ("socket_name",)
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    socket_name: str
    def __init__(self, socket_name: _Optional[str] = ...) -> None: ...

class CudaIpcSource(_message.Message):
    __slots__ = ("socket_name", "device_uuid")
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    socket_name: str
    device_uuid: str
    def __init__(self, socket_name: _Optional[str] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class NixlSource(_message.Message):
    __slots__ = ("agent_metadata", "base_address", "probe_address", "generations_address", "writes")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    base_address: int
    probe_address: int
    generations_address: int
    writes: bool
    def __init__(self, agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., probe_address: _Optional[int] = ..., generations_address: _Optional[int] = ..., writes: _Optional[bool] = ...) -> None: ...

class NixlStaging(_message.Message):
    __slots__ = ("agent_metadata", "base_address", "num_slots", "slot_bytes")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    base_address: int
    num_slots: int
    slot_bytes: int
    def __init__(self, agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("hold_id", "first_block", "num_blocks", "block_ids", "generations", "digests")
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    hold_id: str
    first_block: int
    num_blocks: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hold_id: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class KvPath(_message.Message):
    __slots__ = ("prefill_instance", "transport", "bytes_per_s", "reason")
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_instance: str
    transport: str
    bytes_per_s: float
    reason: str
    def __init__(self, prefill_instance: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...
