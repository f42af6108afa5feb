"""A client that has none of Tandem's code and learns the contract by reflection."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.live_stack import LiveStack

pytestmark = pytest.mark.asyncio(loop_scope="session")
_SCRIPT = Path(__file__).parent.parent.parent / "checks" / "clients_reflection.py"
_MAY_IMPORT = {"__future__", "collections", "google", "grpc", "grpc_reflection", "importlib", "sys", "typing"}
_WAIT_S = 60.0


async def test_a_client_with_reflection_alone_generates_is_refused_by_name_and_cancels(stack: LiveStack) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(_SCRIPT), stack.stack.gateway_address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    assert output.decode().count("passed: ") == 7, output.decode()
    await stack.assert_nothing_held()


async def test_it_imports_nothing_of_tandem() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(_SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= _MAY_IMPORT
