"""What is shipped: the wheel's content, its base requirements, compose.yaml."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parent.parent
_DECLARED = frozenset(
    {
        "accelerate",
        "aiohttp",
        "gguf",
        "google",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "grpc_status",
        "h11",
        "huggingface_hub",
        "jinja2",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "transformers",
        "triton",
        "typer",
        "uvicorn",
        "uvloop",
        "xxhash",
        "yaml",
    }
)
"""Modules of the packages in pyproject.toml's base and extras."""
_NOT_SHIPPED = {"tests", "checks"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, _ROOT], check=True, capture_output=True, timeout=100)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def _files(folder: Path, root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in folder.rglob("*") if path.suffix in (".py", ".pyi", ".cpp", ".proto", ".typed")}


def test_wheel_holds_every_file_of_every_package(wheel: zipfile.ZipFile) -> None:
    packages = {path.parent.name for path in _ROOT.glob("*/__init__.py")} - _NOT_SHIPPED
    ours = {name for package in packages for name in _files(_ROOT / package, _ROOT)}
    protos = _files(_ROOT / "protos" / "tandem", _ROOT / "protos")
    assert ours | protos <= set(wheel.namelist())


def test_wheel_holds_no_tests_or_checks(wheel: zipfile.ZipFile) -> None:
    assert not {name.split("/")[0] for name in wheel.namelist()} & {"tests", "checks"}


def test_base_requirements_leave_torch_to_the_extras(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode())
    requirements = metadata.get_all("Requires-Dist", [])
    assert {"torch", "transformers"} & {one.split(">")[0] for one in requirements if "extra ==" in one}
    assert not [one for one in requirements if "extra ==" not in one and one.startswith(("torch", "transformers", "safetensors"))]


def test_constraints_pin_what_pyproject_asks_for() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (_ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = project["optional-dependencies"]
    asked = {_name(one) for one in [*project["dependencies"], *extras["worker"], *extras["import"], *extras["dev"]]}
    assert asked - {"tandem-serve"} <= pinned


def _name(requirement: str) -> str:
    for end in "[<>=;":
        requirement = requirement.split(end)[0]
    return requirement.strip().lower().replace("_", "-")


def test_modules_import_only_what_is_declared() -> None:
    """Third-party imports outside tests and checks belong to the base or to an extra."""
    shipped = {path.parent.name for path in _ROOT.glob("*/__init__.py")} - _NOT_SHIPPED
    imported = {name for package in shipped for path in (_ROOT / package).rglob("*.py") for name in _top_level_imports(path)}
    assert imported - set(sys.stdlib_module_names) - shipped - {"tandem"} <= _DECLARED


def _top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_compose_file_follows_the_specification() -> None:
    checker = Path(sys.executable).parent / "check-jsonschema"
    command = [str(checker), "--builtin-schema", "vendor.compose-spec", str(_ROOT / "compose.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["gateway", "prefill", "decode"])
def test_every_composed_service_is_asked_for_its_readiness_and_drains(name: str) -> None:
    service: dict[str, Any] = yaml.safe_load((_ROOT / "compose.yaml").read_text())["services"][name]
    assert service["command"] == ["tandem", name]
    assert service["healthcheck"]["test"][-2:] == ["--service", f"tandem.v1.{name.capitalize()}Service"]
    assert service["stop_grace_period"] == "60s"


def test_composed_services_are_published_on_loopback_only() -> None:
    services = yaml.safe_load((_ROOT / "compose.yaml").read_text())["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))
