"""The contract: generated code is what the protos give, and the protos pass buf's STANDARD rules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROTOS = Path(__file__).parent.parent / "protos"
_SOURCES = sorted(path.relative_to(_PROTOS).as_posix() for path in _PROTOS.rglob("*.proto"))


def test_generated_code_is_current(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *_SOURCES], cwd=_PROTOS, check=True, timeout=60)
    generated = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py*")}
    committed = {path.relative_to(_PROTOS).as_posix() for path in (_PROTOS / "tandem").rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert generated == committed, "make proto"
    stale = [name for name in sorted(generated) if (tmp_path / name).read_text() != (_PROTOS / name).read_text()]
    assert stale == [], "make proto"


def test_protos_pass_buf_lint_without_exceptions() -> None:
    result = subprocess.run([Path(sys.executable).parent / "buf", "lint"], cwd=_PROTOS, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    config = (_PROTOS / "buf.yaml").read_text()
    assert "except" not in config
    assert "ignore" not in config


@pytest.mark.parametrize("source", _SOURCES)
def test_everything_in_a_proto_is_commented(source: str) -> None:
    lines = [line.strip() for line in (_PROTOS / source).read_text().splitlines()]
    declares = re.compile(r"^(message|enum|service|rpc|oneof)\b|^(optional |repeated |map<)?[\w.<>, ]+ \w+ = \d+;")
    bare = [f"{source}:{number + 1} {line}" for number, line in enumerate(lines) if declares.match(line) and not lines[number - 1].startswith("//")]
    assert bare == []
