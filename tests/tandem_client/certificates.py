"""A certificate authority of the test's own, by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc

SERVER_NAME = "gateway.example.com"


def write_certificates(directory: Path) -> Path:
    """ca.pem, and a certificate and key for the server (server.pem, server.key) and for a client (client.pem, client.key)."""
    authority = ("-subj", "/CN=Test authority", "-addext", "basicConstraints=critical,CA:TRUE")
    _openssl(directory, "req", "-x509", *_new_key("ca.key"), "-days", "2", *authority, "-out", "ca.pem")
    names = {"server": f"subjectAltName=DNS:{SERVER_NAME},DNS:localhost,IP:127.0.0.1", "client": "subjectAltName=DNS:client"}
    for name, alternative in names.items():
        (directory / f"{name}.ext").write_text(alternative)
        _openssl(directory, "req", *_new_key(f"{name}.key"), "-subj", f"/CN={name}", "-out", f"{name}.csr")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        _openssl(directory, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return directory


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", name)


def _openssl(directory: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def server_credentials(directory: Path, *, mutual: bool = False) -> grpc.ServerCredentials:
    """Of a server that has its certificate here; `mutual`: it asks for the client's."""
    pair = ((directory / "server.key").read_bytes(), (directory / "server.pem").read_bytes())
    return grpc.ssl_server_credentials([pair], (directory / "ca.pem").read_bytes() if mutual else None, require_client_auth=mutual)
