from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from rpc.settings import ServiceSettings, load_settings


class EngineSettings(ServiceSettings):
    """Serves a model for the tests."""

    model: Path
    """Directory of the model."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    """Most sequences in one step."""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EngineSettings.model_fields:
        monkeypatch.delenv(f"TANDEM_{name.upper()}", raising=False)


def _yaml(directory: Path, text: str) -> str:
    path = directory / "tandem.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load_settings(EngineSettings, arguments, prog="engine")
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _yaml(tmp_path, "model: from-file\nport: 1\nmetrics_port: 2\nmax_num_seqs: 3\n")
    monkeypatch.setenv("TANDEM_PORT", "10")
    monkeypatch.setenv("TANDEM_METRICS_PORT", "20")
    settings = load_settings(EngineSettings, ["--config", config, "--port", "100"])

    assert (settings.port, settings.metrics_port, settings.max_num_seqs, settings.model) == (100, 20, 3, Path("from-file"))
    assert settings.drain_grace_s == 30


def test_config_path_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CONFIG", _yaml(tmp_path, "model: m\nport: 7\n"))

    assert load_settings(EngineSettings, []).port == 7


def test_constructor_takes_plain_arguments() -> None:
    assert EngineSettings(model=Path("m"), port=5).port == 5


def test_help_lists_every_setting_with_its_docstring_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(EngineSettings, ["--help"], prog="engine")
    text = " ".join(capsys.readouterr().out.split())

    assert caught.value.code == 0
    for name, field in EngineSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description is not None and " ".join(field.description.split()) in text
    assert "TANDEM_<NAME>" in text and "TANDEM_FAILPOINTS" in text and "OTEL_" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "m", "--port", "70000"), "--port"),
        (("--model", "m", "--port", "http"), "--port"),
        (("--model", "m", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--model", "m", "--log-format", "xml"), "--log-format"),
        (("--model", "m", "--prot", "1"), "--prot"),
        (("--model", "m", "--config", "does-not-exist.yaml"), "does-not-exist.yaml"),
        ((), "--model"),
    ],
)
def test_error_names_the_flag(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str) -> None:
    assert named in _refused(capsys, *arguments)


def test_error_names_the_environment_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PORT", "http")

    assert "TANDEM_PORT" in _refused(capsys, "--model", "m")


def test_several_errors_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(capsys, "--port", "-1")

    assert "--port" in error and "--model" in error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: m\nprot: 1\n", "unknown key 'prot', did you mean 'port'?"),
        ("model: m\nconfig: other.yaml\n", "unknown key 'config'"),
        ("- model\n", "no mapping"),
        ("model: [\n", "not YAML"),
        ("model: m\nport: http\n", "file port"),
    ],
)
def test_faulty_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str) -> None:
    assert named in _refused(capsys, "--config", _yaml(tmp_path, text))


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_settings(EngineSettings, ["--model", "m", "--config", _yaml(tmp_path, "")]).port == 0
