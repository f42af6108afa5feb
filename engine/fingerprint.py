"""The identity of a model's weights: KV caches pair only when it is equal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
_READ_BYTES = 1 << 20


def model_fingerprint(directory: Path) -> str:
    """SHA-256, in hex, over the canonical config.json and the bytes of every safetensors file, in order of their names.

    Where the model lies, when it was written and by which version does not count; the dtype it is loaded in is `KvLayout.dtype`'s business.
    """
    config = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    buffer = bytearray(_READ_BYTES)
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"\n{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()
