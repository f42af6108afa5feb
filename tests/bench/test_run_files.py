"""Runs and where they took place, on disk and back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.environment import environment, model_digest, shown_command
from bench.record import Outcome
from bench.run import Generator, Run, Sample
from bench.run_files import RunFileError, file_name, read_run, write_run
from tests.bench.records import record


def a_run(label: str = "tandem at 2.5/s") -> Run:
    records = (
        record(0, due_s=0.1, sent_s=0.1 + 1e-4, at_s=[0.25, 0.3125], tokens=[1, 3], warm_up=True),
        record(1, due_s=0.5, outcome=Outcome.REFUSED, error='RESOURCE_EXHAUSTED: "quoted" ä'),
        record(2, due_s=None, at_s=[1 / 3]),
    )
    return Run(
        label=label,
        target="tandem 127.0.0.1:1",
        plan={"workload": "fixed", "loop": "open", "scale": 0.1},
        started_at="2030-01-01T00:00:00.000+00:00",
        duration_s=1 / 7,
        records=records,
        generator=Generator(0.001, 1 / 3, 0.1, 2),
        environment={"cpu": "a", "cores": {"decode": "0-3"}, "notes": ["ä"]},
        samples=(Sample(0.5, 1, 2, 0.25), Sample(1.5, 1, 2, None)),
        cold_start={"ttft_s": 0.2, "e2e_s": 0.3},
        void=("because",),
    )


def test_a_run_that_was_written_reads_back_the_same(tmp_path: Path) -> None:
    run = a_run()
    path = write_run(run, tmp_path / "new" / "folder")
    back = read_run(path)
    for name in ("label", "target", "plan", "started_at", "duration_s", "generator", "environment", "samples", "cold_start", "void"):
        assert getattr(back, name) == getattr(run, name)
    assert back.records[:2] == run.records[:2]
    assert back.records[2].arrived[0].at_s == pytest.approx(1 / 3, abs=1e-6)  # times of messages are rounded to a microsecond
    assert read_run(write_run(back, tmp_path)) == back
    assert read_run(path.with_suffix(".jsonl")) == back


def test_records_are_one_line_each_and_apart_from_the_rest(tmp_path: Path) -> None:
    path = write_run(a_run(), tmp_path)
    assert path.name == "tandem_at_2.5_s.json" and "records" not in json.loads(path.read_text())
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[1])["outcome"] == "refused"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tandem_at_2.5_s.json", "tandem_at_2.5_s.jsonl"]


@pytest.mark.parametrize("label", ["", "..", "/etc/passwd", "a/../b", "ä b"])
def test_no_label_leaves_the_folder(label: str) -> None:
    name = file_name(label)
    assert name and Path(name).name == name and not name.startswith(".")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda path: path.unlink(), "cannot read .*run.json: No such file"),
        (lambda path: path.with_suffix(".jsonl").unlink(), "cannot read .*run.jsonl: No such file"),
        (lambda path: path.write_text("{"), "run.json is no run: JSONDecodeError"),
        (lambda path: path.write_text("[]"), "run.json is no run"),
        (lambda path: path.write_text('{"format": 99}'), "format 99, expected 1"),
        (lambda path: path.with_suffix(".jsonl").write_text('{"index": 1}\n'), r"run.jsonl:1 is no record: KeyError"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, spoil: object, error: str) -> None:
    path = write_run(a_run("run"), tmp_path)
    assert callable(spoil)
    spoil(path)
    with pytest.raises(RunFileError, match=error):
        read_run(path)


def test_the_environment_names_machine_server_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KV_CHECKSUM", "1")
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    found = environment(["tandem", "bench", "run", "--label", "a b"], described={"version": "1"}, cores={"decode": "0-3"}, notes=["n"])
    assert found["command"] == "tandem bench run --label 'a b'" and found["server"] == {"version": "1"}
    assert found["cores"] == {"decode": "0-3"} and found["notes"] == ["n"]
    assert set(found["generator_cores"]) == os.sched_getaffinity(0) and found["cpu"]
    assert found["packages"]["grpcio"][0].isdigit() and "secret" not in json.dumps(found)
    assert found["tandem_variables"]["TANDEM_KV_CHECKSUM"] == "1"


def test_no_key_of_a_header_is_written_down() -> None:
    assert shown_command(["tandem", "--header", "Authorization=Bearer k", "--header=X=k", "--seed", "1"]) == "tandem --header ... --header=... --seed 1"


def test_the_models_hash_is_of_its_shape_and_not_of_its_weights(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"a": 1, "b": 2}')
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    first = model_digest(tmp_path)
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    config.write_text('{"b": 2,   "a": 1}')
    assert model_digest(tmp_path) == first
    save_file({"w": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert model_digest(tmp_path) != first


def test_a_folder_without_a_model_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        model_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="no safetensors"):
        model_digest(tmp_path)
