"""The names of all spans, span events and span attributes: `gen_ai.*` and `rpc.*` where the conventions have one, else `tandem.*`.

gateway SERVER tandem.v1.GatewayService/Generate, or POST /v1/completions and the like
  prompt (one each, only when an HTTP body has several)
  tokenize, queue, route
  CLIENT tandem.v1.DecodeService/Generate
    decode SERVER tandem.v1.DecodeService/Generate
      pairing (only when a request had to wait for one)
      reserve
      CLIENT tandem.v1.PrefillService/Prefill
        prefill SERVER tandem.v1.PrefillService/Prefill: prefill.queue, prefill, kv.hold
      kv_transfer
      decode
"""

from __future__ import annotations

from typing import Final

# Segments. Each has two timestamps of its own; none is what the others leave over.
TOKENIZE: Final = "tokenize"
QUEUE: Final = "queue"
ROUTE: Final = "route"
RESERVE: Final = "reserve"
PREFILL_QUEUE: Final = "prefill.queue"
PREFILL: Final = "prefill"
KV_HOLD: Final = "kv.hold"
KV_TRANSFER: Final = "kv_transfer"
DECODE: Final = "decode"
PAIRING: Final = "pairing"
PROMPT: Final = "prompt"
SEGMENTS: Final = (TOKENIZE, QUEUE, ROUTE, RESERVE, PREFILL_QUEUE, PREFILL, KV_HOLD, KV_TRANSFER, DECODE)

# Events.
FIRST_TOKEN: Final = "first_token"
CHUNK: Final = "chunk"
PREEMPTED: Final = "preempted"
KV_PATH_CHANGED: Final = "kv_path_changed"

# RPC attributes (OpenTelemetry's RPC conventions).
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"

# HTTP attributes (OpenTelemetry's HTTP conventions).
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"

# Generation attributes (OpenTelemetry's GenAI conventions).
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# Ours.
REQUEST_ID: Final = "tandem.request_id"
PROMPT_INDEX: Final = "tandem.prompt_index"
PROMPT_PATH: Final = "tandem.path"
QUEUE_REASON: Final = "tandem.queue.reason"
QUEUE_POSITION: Final = "tandem.queue.position"
PREFILL_INSTANCE: Final = "tandem.prefill_instance"
DECODE_INSTANCE: Final = "tandem.decode_instance"
NUM_BLOCKS: Final = "tandem.num_blocks"
NUM_CHARGED_BLOCKS: Final = "tandem.num_charged_blocks"
NUM_TOKENS: Final = "tandem.num_tokens"
KV_TRANSPORT: Final = "tandem.kv.transport"
KV_BYTES: Final = "tandem.kv.bytes"
KV_WAIT_S: Final = "tandem.kv.wait_s"
KV_WIRE_S: Final = "tandem.kv.wire_s"
KV_EXPOSED_S: Final = "tandem.kv.exposed_s"
KV_HIDDEN_S: Final = "tandem.kv.hidden_s"
KV_OVERLAP: Final = "tandem.kv.overlap"
KV_PATH_BYTES_PER_S: Final = "tandem.kv.path.bytes_per_s"
KV_PATH_FROM: Final = "tandem.kv.path.from"
KV_PATH_TO: Final = "tandem.kv.path.to"
KV_PATH_REASON: Final = "tandem.kv.path.reason"
CANCELLED: Final = "tandem.cancelled"
