"""The command as a process: exit codes, and one line instead of a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "from cli.main import main; main()", *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("up", "--model", "/nonexistent"), 1, "no model directory"),
        (("demo", "--model", "/nonexistent"), 1, "no model directory"),
        (("import", "/nonexistent.gguf"), 1, "neither a GGUF file nor a known package"),
        (("import", __file__), 1, "not a GGUF file"),
        (("generate", "hi", "--gateway", "127.0.0.1:1"), 2, "cannot be reached"),
        (("status", "--gateway", "127.0.0.1:1"), 2, "cannot be reached"),
    ],
)
def test_errors_of_a_user_are_one_line(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    result = _tandem(*arguments, *(("--output", str(tmp_path / "model")) if arguments[0] == "import" else ()))
    assert result.returncode == code
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_health_of_nobody_exits_with_2() -> None:
    assert _tandem("health", "127.0.0.1:1").returncode == 2


def test_version_names_tandem_and_grpc() -> None:
    result = _tandem("version")
    assert result.returncode == 0
    assert result.stdout.startswith("tandem 0.")
    assert "grpcio 1." in result.stdout


def test_help_imports_no_torch_and_no_grpc() -> None:
    code = "import sys; from cli.main import app; app(['--help'], standalone_mode=False); sys.exit(int(bool({'torch', 'grpc'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
