"""How a client reaches its gateway: address, encryption, key, and the channel's options with a reason for each."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from typing import Final

import grpc

from tandem_client.tls import TlsConfig

Options = tuple[tuple[str, int | str], ...]

_SERVICE_CONFIG: Final = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

_OPTIONS: Final[Options] = (
    # A gateway that is frozen is given up after 8 s. All four are needed: time and timeout alone find only a peer whose kernel is silent.
    ("grpc.keepalive_time_ms", 4_000),  # ping after 4 s in which nothing was received
    ("grpc.keepalive_timeout_ms", 4_000),  # 4 s without an acknowledgement from the other kernel
    ("grpc.http2.ping_timeout_ms", 4_000),  # 4 s without an answer from the other process
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be silent for long while its prompt waits
    ("grpc.keepalive_permit_without_calls", 1),  # an idle connection to a dead gateway is found before the next call uses it
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the web: a proxy answers pings itself, and may buffer a stream
    ("grpc.enable_retries", 0),  # RetryPolicy decides, in one place
    ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted gateway is found at once,
    ("grpc.max_reconnect_backoff_ms", 1_000),  # not after the two minutes of the default
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time limit of one attempt to connect
    ("grpc.max_receive_message_length", 32 << 20),  # prompt_logprobs of a long prompt pass the default of 4 MiB
    ("grpc.max_send_message_length", 32 << 20),
    ("grpc.service_config", _SERVICE_CONFIG),  # all addresses behind a name are used; the default takes the first one alone
    ("grpc.service_config_disable_resolution", 1),  # and no TXT record changes that
)


@dataclass(frozen=True, slots=True)
class Connection:
    """Where to, and as whom."""

    target: str
    """host:port, or any of gRPC's target names: dns:///name:port, ipv4:1.2.3.4:50051,1.2.3.5:50051, unix:/path."""
    tls: TlsConfig | None = None
    api_key: str | None = field(default=None, repr=False)
    plaintext_api_key: bool = False
    """Send the key without encryption to hosts other than this one."""

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty; host:port is needed")
        if self.api_key is None:
            return
        if not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable():
            raise ValueError("api_key must be printable ASCII")  # and is not shown
        if self.tls is None and not self.plaintext_api_key and not is_this_host(self.target):
            raise ValueError(f"the API key would go to {self.target} in plain text; give tls, or plaintext_api_key=True if the network is trusted")

    @property
    def options(self) -> Options:
        """Of the channel."""
        named = (("grpc.ssl_target_name_override", self.tls.server_name),) if self.tls is not None and self.tls.server_name else ()
        return (*_OPTIONS, *named)

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for an insecure channel. Raises OSError for files that cannot be read."""
        return None if self.tls is None else self.tls.credentials()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)


def is_this_host(target: str) -> bool:
    """Whether what is sent there stays on this host: loopback addresses, localhost, and unix sockets."""
    scheme, _, rest = target.rpartition(":///")
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    if not scheme and target.startswith(("ipv4:", "ipv6:")):
        return all(_is_loopback(address) for address in target.partition(":")[2].split(","))
    return _is_loopback(rest if scheme else target)


def _is_loopback(address: str) -> bool:
    host = address[1:].partition("]")[0] if address.startswith("[") else address.rpartition(":")[0] or address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
