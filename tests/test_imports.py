"""Imports run one way. Every import statement is read, lazy ones and those under TYPE_CHECKING too."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent

# What each package may import of ours: whole packages, or single modules where only those are meant.
_ALLOWED: dict[str, frozenset[str]] = {
    "tandem_client": frozenset({"tandem"}),
    "bench": frozenset({"tandem_client", "tandem", "rpc", "telemetry", "capacity"}),
    "cli": frozenset({"bench", "tandem_client", "tandem", "rpc", "telemetry", "capacity"}),
    "simulate": frozenset({"engine", "gateway.admission", "gateway.ledger", "gateway.router", "capacity"}),
    "gateway": frozenset({"tandem", "rpc", "telemetry", "capacity"}),
    "prefill_svc": frozenset({"tandem", "rpc", "telemetry", "engine", "kvtransfer", "worker", "capacity"}),
    "decode_svc": frozenset({"tandem", "rpc", "telemetry", "engine", "kvtransfer", "worker", "capacity"}),
    "worker": frozenset({"tandem", "rpc", "telemetry", "engine", "capacity"}),
    "kvtransfer": frozenset({"tandem", "engine.kv_cache", "engine.proto", "engine.kernels.build"}),
    "rpc": frozenset({"tandem", "telemetry"}),
    "engine": frozenset({"capacity"}),
    "tandem": frozenset(),
    "telemetry": frozenset(),
    "capacity": frozenset(),
}
_ALLOWED_IN_FILE = {"engine/proto.py": frozenset({"tandem"})}
_NEVER_IMPORTED = frozenset({"checks", "tests"})
_OURS = frozenset(_ALLOWED) | _NEVER_IMPORTED
_NO_TORCH = ("gateway", "rpc", "telemetry", "cli", "simulate")


def _folder(package: str) -> Path:
    return _ROOT / "protos" / "tandem" if package == "tandem" else _ROOT / package


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            argument = node.args[0]
            yield node.lineno, str(argument.value) if isinstance(argument, ast.Constant) else "<computed>"


def _may_import(package: str, relative: str, name: str) -> bool:
    allowed = _ALLOWED[package] | _ALLOWED_IN_FILE.get(relative, frozenset()) | {package}
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def _violations(package: str) -> list[str]:
    found = []
    for path in sorted(_folder(package).rglob("*.py")):
        relative = path.relative_to(_ROOT).as_posix()
        for line, name in _imports(path):
            if name.startswith((".", "<computed>")) and package != "tandem":
                found.append(f"{relative}:{line} imports {name}: relative or computed, so this test cannot follow it")
            elif name.split(".")[0] in _OURS and not _may_import(package, relative, name):
                found.append(f"{relative}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", sorted(package for package in _ALLOWED if _folder(package).is_dir()))
def test_imports_run_one_way(package: str) -> None:
    assert _violations(package) == []


def test_every_package_has_its_rule() -> None:
    packages = {path.parent.name for path in _ROOT.glob("*/__init__.py")} - {"tests", "checks"}
    assert packages <= set(_ALLOWED)


def test_wrong_direction_is_found(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("if TYPE_CHECKING:\n    from engine.scheduler import Scheduler\ndef lazy():\n    import prefill_svc\n")
    names = [name for _, name in _imports(path)]
    assert names == ["engine.scheduler.Scheduler", "prefill_svc"]
    assert not any(_may_import("gateway", "gateway/wrong.py", name) for name in names)


def _modules(package: str) -> list[str]:
    names = (".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in sorted(_folder(package).rglob("*.py")))
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("package", [package for package in _NO_TORCH if _folder(package).is_dir()])
def test_importing_the_whole_package_leaves_torch_out(package: str) -> None:
    code = f"""
import importlib, sys
for name in {_modules(package)!r}:
    importlib.import_module(name)
sys.exit(str(found) if (found := {{"torch", "transformers"}} & set(sys.modules)) else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_torch_is_there_to_be_left_out() -> None:
    assert importlib.util.find_spec("torch") is not None
