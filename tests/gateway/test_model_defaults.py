from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.__main__ import load_model
from gateway.model_defaults import ModelDefaults
from gateway.served_model import ModelDirectoryError, ServedModel
from gateway.settings import GatewaySettings
from rpc.errors import StartupError
from rpc.settings import load_settings


def directory_with(content: dict[str, Any], model_dirs: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(model_dirs["smollm2"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return tmp_path


def settings(directory: Path, *flags: str) -> GatewaySettings:
    return load_settings(GatewaySettings, prog="gateway", argv=["--model", str(directory), "--decode", "d0=127.0.0.1:1", *flags])


def test_a_models_own_defaults_are_taken_and_told_at_start(model_dirs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = directory_with(
        {"temperature": 0.6, "top_p": 0.95, "top_k": 64, "do_sample": True, "eos_token_id": [2], "max_new_tokens": 99}, model_dirs, tmp_path
    )
    with caplog.at_level(logging.INFO):
        model = load_model(settings(directory))
        without = load_model(settings(directory, "--generation-config", "none"))
    assert model.defaults == ModelDefaults({"temperature": 0.6, "top_p": 0.95, "top_k": 64}, 99)
    assert without.defaults == ModelDefaults()
    assert without.eos_token_ids == model.eos_token_ids == {2}
    lines = [record.getMessage() for record in caplog.records if "defaults of the model" in record.getMessage()]
    assert lines == ["defaults of the model: temperature 0.6, top_p 0.95, top_k 64, max_new_tokens 99", "defaults of the model: none"]


def test_what_the_file_leaves_open_or_null_is_no_default(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = directory_with({"bos_token_id": 1, "temperature": None, "max_length": 20, "num_beams": 4}, model_dirs, tmp_path)
    assert ServedModel.load(directory).defaults == ModelDefaults()


@pytest.mark.parametrize(
    "content", [{"temperature": "warm"}, {"top_k": 1.5}, {"top_p": True}, {"max_new_tokens": 0}, {"max_new_tokens": 2**40}, {"min_p": [0.1]}]
)
def test_a_default_that_is_no_number_is_named(content: dict[str, Any], model_dirs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=next(iter(content))):
        ServedModel.load(directory_with(content, model_dirs, tmp_path))


@pytest.mark.parametrize("content", [{"temperature": 5.0}, {"top_p": 0}, {"top_k": -1, "min_p": 2}, {"repetition_penalty": 0}])
def test_a_default_out_of_range_stops_the_start_and_says_how_to_go_on(content: dict[str, Any], model_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = directory_with(content, model_dirs, tmp_path)
    with pytest.raises(StartupError, match=rf"generation_config\.json: {list(content)[-1]}: must be .*--generation-config none"):
        load_model(settings(directory))
    load_model(settings(directory, "--generation-config", "none"))
