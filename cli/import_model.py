"""`tandem import`: a GGUF file becomes a model directory that workers load without converting anything."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import UserError
from cli.manifest import Manifest
from cli.model_source import ModelSource

DTYPES = ("bfloat16", "float32", "float16")

_ENDS_OF_TURN = frozenset({"<end_of_turn>", "<|im_end|>", "<|eot_id|>"})

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """Where the model lies, and whether anything had to be done."""

    directory: Path
    written: bool
    num_bytes: int
    seconds: float


def import_model(source: ModelSource, target: Path, *, dtype: str, say: Say) -> Imported:
    """Converts `source` into `target`, or verifies that this was done before. Two imports of one target take turns.

    The target appears whole or not at all. One that an import wrote and something damaged is replaced; a directory that no import wrote
    is refused. Raises UserError.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; one of {', '.join(DTYPES)}")
    started = time.monotonic()
    with _only_importer_of(target):
        written = _outdated(source, target, dtype, say)
        if written:
            _write(source, target, dtype, say)
    num_bytes = sum(path.stat().st_size for path in target.iterdir())
    return Imported(target, written, num_bytes, time.monotonic() - started)


@contextmanager
def _only_importer_of(target: Path) -> Iterator[None]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"{target.parent}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _outdated(source: ModelSource, target: Path, dtype: str, say: Say) -> bool:
    if not target.exists():
        return True
    manifest = Manifest.read(target) if target.is_dir() else None
    if manifest is None:
        raise UserError(f"{target} exists and was not written by an import; choose another --output or remove it")
    if (manifest.source_sha256, manifest.dtype) != (source.sha256, dtype):
        say(f"import: {target} holds another source or dtype ({manifest.dtype}): importing again")
        return True
    if damaged := manifest.damaged(target):
        say(f"import: {', '.join(damaged)} in {target} differ from the manifest: importing again")
        return True
    return False


def _write(source: ModelSource, target: Path, dtype: str, say: Say) -> None:
    prefix = f".{target.name}.import-"
    for left_over in target.parent.glob(f"{prefix}*"):  # of an import that was killed; ours is the only one now
        shutil.rmtree(left_over)
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _convert(source, building, dtype, say)
        Manifest.of(building, source_sha256=source.sha256, dtype=dtype).write(building)
        for path in (building, *building.iterdir()):  # mkdtemp and safetensors write for their owner alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        if target.exists():
            target.rename(target.parent / f"{prefix}replaced")
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(target.parent / f"{prefix}replaced", ignore_errors=True)


def _convert(source: ModelSource, directory: Path, dtype: str, say: Say) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # the bars of libraries below; read when they are imported
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import accelerate  # noqa: F401  (transformers wants it for GGUF)
        import gguf
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'tandem-serve[import]'") from None
    say(f"import: reading {source.files[0].name}")
    with source.whole(directory.parent) as gguf_file:
        try:
            header = _read_header(gguf.GGUFReader(gguf_file))
        except (ValueError, IndexError) as error:
            raise UserError(f"{gguf_file}: not a GGUF file ({error})") from None
        from cli.gguf_tokenizer import write_tokenizer

        if license_name := header.get("general.license"):
            say(f"import: the model's license is {license_name}")
        write_tokenizer(header, directory, max_model_len=int(header[f"{header['general.architecture']}.context_length"]))
        say(f"import: dequantizing to {dtype}")
        _write_weights(transformers, gguf_file, directory, dtype, header)


def _read_header(reader: Any) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def _write_weights(transformers: Any, gguf: Path, directory: Path, dtype: str, header: dict[str, Any]) -> None:
    """config.json, generation_config.json and model.safetensors. Left packed, GGUF weights would be served slowly."""
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=dtype, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    for field in ("_model_name_or_path", "quantization_config"):  # neither is true of what is written
        if hasattr(model.config, field):
            delattr(model.config, field)
    model.generation_config.eos_token_id = _end_token_ids(header)
    model.save_pretrained(directory)


def _end_token_ids(header: dict[str, Any]) -> int | list[int]:
    """The end of a text and, where the vocabulary has one, of a turn: a header names one of them only."""
    eos: int = header["tokenizer.ggml.eos_token_id"]
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    ids = sorted({eos, *(token_id for token_id, token in enumerate(tokens) if token in _ENDS_OF_TURN)})
    return ids if len(ids) > 1 else eos
