"""Encryption of a client's connection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files, read when the connection is made."""

    root: Path | str | None = None
    """Certificates that the gateway's must lead to. None: those that gRPC ships with."""
    cert_chain: Path | str | None = None
    """This client's own certificate, where the gateway asks for one (mutual TLS); needs `key`."""
    key: Path | str | None = None
    """Its private key."""
    server_name: str = ""
    """The name in the gateway's certificate where that is not the target's."""

    def __post_init__(self) -> None:
        if (self.cert_chain is None) != (self.key is None):
            raise ValueError("cert_chain and key are given together or not at all")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError."""
        return grpc.ssl_channel_credentials(_read(self.root), _read(self.key), _read(self.cert_chain))


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
