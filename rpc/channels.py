"""One table of channel and server options, each with its reason, and the two kinds of channels.

Rule 1 stands on the liveness part: a hold is the body of an RPC, so a frozen peer's holds are free when its connection is given up.
Measured with SIGSTOP (grpcio 1.85.3): keepalive time and timeout alone did nothing in 45 s, with either side frozen, also with
max_pings_without_data 0; with ping_timeout as well both sides saw it after 7.5 s.
"""

from __future__ import annotations

from typing import Final

import grpc

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES: Final = 32 << 20
# A KV chunk is at most 1 MiB and its header; whatever is larger comes from no peer of ours.
MAX_KV_MESSAGE_BYTES: Final = (1 << 20) + (64 << 10)

_LIVENESS: Final[Options] = (
    ("grpc.keepalive_time_ms", 4_000),  # ping after 4 s in which nothing was received
    ("grpc.keepalive_timeout_ms", 4_000),  # sets TCP_USER_TIMEOUT: 4 s without an acknowledgement from the peer's kernel
    ("grpc.http2.ping_timeout_ms", 4_000),  # the bound that gives up a peer whose kernel answers and whose process does not
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a decoding stream may be silent for long
    ("grpc.keepalive_permit_without_calls", 1),  # an idle connection to a dead peer is found before the next request uses it
)

# A slow link full of KV bytes answers pings late; progress is counted in bytes by the reader, so these are only a last resort.
_DATA_LIVENESS: Final[Options] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)

_DIRECT: Final[Options] = (
    ("grpc.enable_http_proxy", 0),  # http_proxy in the environment must not reach between services: a proxy answers pings itself
    ("grpc.enable_retries", 0),  # a retry is a decision of the failure policy, never the library's
    ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted worker is found at once;
    ("grpc.min_reconnect_backoff_ms", 2_000),  # this one is the time limit of a connection attempt
    ("grpc.max_reconnect_backoff_ms", 500),  # the default of 120 s would leave a worker out for minutes; 2 s cost every start of a stack up to 4 s
)

CONTROL_OPTIONS: Final[Options] = (
    *_LIVENESS,
    *_DIRECT,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),  # the default of 4 MiB refuses long prompts; -1 lets a peer take all memory
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

DATA_OPTIONS: Final[Options] = (
    *_DATA_LIVENESS,
    *_DIRECT,
    # On a slow link the server's ping waits behind the bytes in its socket, and its 4 s hold for this connection too. Measured at 1 MB/s: the stream was
    # lost after 16 to 20 s whatever this side's ping timeout; with a fixed window that bounds what is in flight it ran to its end (cost: a tenth of the rate).
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # else gRPC puts all channels to a target on one connection, and KV bytes delay the holds' pings
    ("grpc.max_receive_message_length", MAX_KV_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_KV_MESSAGE_BYTES),
)

SERVER_OPTIONS: Final[Options] = (
    *_LIVENESS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # default 300 s: the clients' pings would draw GOAWAY too_many_pings
    ("grpc.http2.max_ping_strikes", 0),  # and a silent stream must not lose its connection for them either
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 4_096),  # a connection; without it one client opens RPCs that never send their request until memory is gone
    ("grpc.max_metadata_size", 16 << 10),  # a header of megabytes is refused before it is stored
    ("grpc.so_reuseport", 0),  # two servers on one port by accident would both look healthy
)


def control_channel(target: str) -> grpc.aio.Channel:
    """A channel for RPCs that hold something; a frozen peer ends them within 9 s. One per target, for the process's lifetime."""
    return grpc.aio.insecure_channel(target, options=CONTROL_OPTIONS)


def data_channel(target: str) -> grpc.aio.Channel:
    """A channel for KV bytes, with a connection of its own; its RPCs need a no-progress limit counted in bytes."""
    return grpc.aio.insecure_channel(target, options=DATA_OPTIONS)
