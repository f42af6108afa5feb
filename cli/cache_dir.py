"""Where imported models live."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """TANDEM_CACHE_DIR, or else tandem under XDG_CACHE_HOME or ~/.cache. May not exist yet."""
    if own := os.environ.get("TANDEM_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"


def models_dir() -> Path:
    """One directory per imported model."""
    return cache_dir() / "models"
