from tandem.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadReport(_message.Message):
    __slots__ = ("incarnation", "ready", "draining", "num_requests_running", "num_requests_waiting", "num_requests_in_handover", "prefill_backlog_tokens", "num_blocks", "num_free_blocks", "block_size", "max_model_len", "max_num_seqs", "reserve_output_tokens", "layout", "model", "vocab_size", "eos_token_ids", "kv_paths")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_HANDOVER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_PATHS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    ready: bool
    draining: bool
    num_requests_running: int
    num_requests_waiting: int
    num_requests_in_handover: int
    prefill_backlog_tokens: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    reserve_output_tokens: int
    layout: _kv_pb2.KvLayout
    model: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_paths: _containers.RepeatedCompositeFieldContainer[_kv_pb2.KvPath]
    def __init__(self, incarnation: _Optional[str] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_requests_in_handover: _Optional[int] = ..., prefill_backlog_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., reserve_output_tokens: _Optional[int] = ..., layout: _Optional[_Union[_kv_pb2.KvLayout, _Mapping]] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_paths: _Optional[_Iterable[_Union[_kv_pb2.KvPath, _Mapping]]] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "owners", "sequences_by_state", "num_holds", "num_readers", "computed_prompt_tokens", "num_steps", "num_late_steps", "num_active_rpcs", "num_preemptions", "num_readmissions")
    class SequencesByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDS_FIELD_NUMBER: _ClassVar[int]
    NUM_READERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_RPCS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_READMISSIONS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    owners: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    sequences_by_state: _containers.ScalarMap[str, int]
    num_holds: int
    num_readers: int
    computed_prompt_tokens: int
    num_steps: int
    num_late_steps: int
    num_active_rpcs: int
    num_preemptions: int
    num_readmissions: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ..., sequences_by_state: _Optional[_Mapping[str, int]] = ..., num_holds: _Optional[int] = ..., num_readers: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_late_steps: _Optional[int] = ..., num_active_rpcs: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_readmissions: _Optional[int] = ...) -> None: ...

class BlockOwner(_message.Message):
    __slots__ = ("name", "num_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_blocks: int
    def __init__(self, name: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...
