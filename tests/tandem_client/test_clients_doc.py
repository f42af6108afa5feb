"""Every Python example of docs/clients.md runs as it stands there, against real services."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.live_stack import LiveStack
from tests.tandem_client.certificates import SERVER_NAME, server_credentials
from tests.tandem_client.scripted import CuttingGateway, serving

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "clients.md").read_text()
_EXAMPLES = [
    pytest.param(match["code"], id=re.sub(r"\W+", "_", _PAGE[: match.start()].rpartition("\n## ")[2].partition("\n")[0]))
    for match in re.finditer(r"^```python\n(?P<code>.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)
]
_PLAIN, _TLS = '"127.0.0.1:50051"', f'"{SERVER_NAME}:443"'


async def _run(code: str, directory: Path) -> str:
    """Standard output of a program that ends well and says nothing on standard error."""
    path = f"{_ROOT}:{_ROOT / 'protos'}"
    environment = {**os.environ, "PYTHONPATH": path, "TANDEM_API_KEY": "sk-test", "PYTHONWARNINGS": "error::ResourceWarning"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=directory, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, err.decode()) == (0, ""), code
    return out.decode()


def test_there_is_an_example_for_each_use() -> None:
    headings = set(re.findall(r"^## (.+)$", _PAGE, re.MULTILINE))
    uses = {"A completion", "asyncio", "Streaming", "Chat", "Cancelling", "Deadlines", "Errors", "Retries", "Resuming after a cut", "TLS and an API key"}
    assert uses | {"Log probabilities", "Several samples", "Any gRPC client"} <= headings
    assert len(_EXAMPLES) >= len(uses) + 3


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("code", _EXAMPLES)
async def test_the_example_runs(code: str, stack: LiveStack, certificates: Path) -> None:
    plain = stack.stack.gateway_address
    assert (_PLAIN in code) is not (_TLS in code), "an example talks with one of the two addresses"
    passing_on = CuttingGateway(plain, ())
    async with serving(passing_on, credentials=server_credentials(certificates)) as encrypted:
        local = code.replace(_PLAIN, f'"{plain}"').replace(_TLS, f'"{encrypted}"')
        assert await _run(local, certificates)
    assert len(passing_on.requests) == (_TLS in code)
    await stack.assert_nothing_held()
