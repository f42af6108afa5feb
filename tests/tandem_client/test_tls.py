"""TLS and the API key, against a TLS server with certificates made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_client import RetryPolicy, TlsConfig, Unavailable
from tests.tandem_client.certificates import SERVER_NAME, server_credentials
from tests.tandem_client.either import Either
from tests.tandem_client.scripted import ScriptedGateway, message, says, serving

_WHOLE = says(message(0, 5, text="a", seed=7, finish=True))


async def test_an_encrypted_call_carries_the_key(kind: str, certificates: Path) -> None:
    gateway = ScriptedGateway(_WHOLE)
    async with serving(gateway, credentials=server_credentials(certificates)) as target:
        async with Either(kind, target, tls=TlsConfig(root=certificates / "ca.pem"), api_key="sk-secret") as client:
            assert (await client.generate("x")).text == "a"
        assert gateway.metadata[0]["authorization"] == "Bearer sk-secret"


async def test_the_certificate_may_have_another_name_than_the_target(kind: str, certificates: Path) -> None:
    async with serving(ScriptedGateway(_WHOLE), credentials=server_credentials(certificates)) as target:
        tls = TlsConfig(root=certificates / "ca.pem", server_name=SERVER_NAME)
        async with Either(kind, target, tls=tls) as client:
            assert (await client.generate("x")).text == "a"
        wrong = TlsConfig(root=certificates / "ca.pem", server_name="other.example.com")
        async with Either(kind, target, tls=wrong, retry=RetryPolicy.never()) as client:
            with pytest.raises(Unavailable):
                await client.generate("x")


async def test_a_gateway_that_no_known_authority_vouches_for_gets_nothing(kind: str, certificates: Path) -> None:
    gateway = ScriptedGateway(_WHOLE)
    async with serving(gateway, credentials=server_credentials(certificates)) as target:
        for tls in (True, TlsConfig(root=certificates / "client.pem")):
            async with Either(kind, target, tls=tls, api_key="sk-secret", retry=RetryPolicy.never()) as client:
                with pytest.raises(Unavailable):
                    await client.generate("x")
        assert gateway.metadata == []


async def test_a_client_shows_its_own_certificate_where_it_is_asked_for(kind: str, certificates: Path) -> None:
    async with serving(ScriptedGateway(_WHOLE), credentials=server_credentials(certificates, mutual=True)) as target:
        own = TlsConfig(certificates / "ca.pem", cert_chain=certificates / "client.pem", key=certificates / "client.key")
        async with Either(kind, target, tls=own) as client:
            assert (await client.generate("x")).text == "a"
        async with Either(kind, target, tls=TlsConfig(certificates / "ca.pem"), retry=RetryPolicy.never()) as client:
            with pytest.raises(Unavailable):
                await client.generate("x")
