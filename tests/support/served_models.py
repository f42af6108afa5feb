"""A tiny model that all three services can serve."""

from __future__ import annotations

from pathlib import Path

from checks.tiny_models import write_tiny_model
from checks.tiny_tokenizers import write_tiny_tokenizer


def write_served_model(directory: Path) -> Path:
    """Weights, tokenizer and chat template; a context long enough for streams that outlast a fault."""
    write_tiny_model(directory, max_position_embeddings=16384)
    write_tiny_tokenizer(directory)
    return directory
