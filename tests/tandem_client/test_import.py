"""What users get who import the client alone."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import tandem_client

_ROOT = Path(__file__).parents[2]
_LOADED = """
import json, sys
{imports}
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names))))
"""


def _loaded(imports: str) -> set[str]:
    code = _LOADED.format(imports=imports)
    environment = {"PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd="/", env=environment)
    return set(json.loads(done.stdout))


def test_the_client_loads_nothing_but_grpc_protobuf_and_the_contract() -> None:
    # grpc itself looks for its own further packages and takes those that are installed.
    before = _loaded("import grpc, google.protobuf.message, google.rpc.status_pb2")
    assert _loaded("import tandem_client") - before == {"tandem_client", "tandem"}


def test_everything_public_says_what_it_is() -> None:
    undocumented = []
    for name in tandem_client.__all__:
        public = getattr(tandem_client, name)
        if not inspect.getdoc(public):
            undocumented.append(name)
        undocumented += [
            f"{name}.{member}"
            for member, value in vars(public).items()
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)) and not inspect.getdoc(value)
        ]
    assert undocumented == []


def test_both_clients_have_the_same_surface() -> None:
    def surface(owner: type) -> dict[str, list[str]]:
        methods = {name: value for name, value in vars(owner).items() if inspect.isfunction(value) and not name.startswith("_")}
        return {name: list(inspect.signature(value).parameters) for name, value in methods.items()}

    assert surface(tandem_client.Client) == surface(tandem_client.AsyncClient)
    assert surface(tandem_client.Stream) == surface(tandem_client.AsyncStream)
