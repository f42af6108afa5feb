"""Random checkpoints of every architecture; checks make the same ones."""

from checks.tiny_models import EOS_TOKEN_ID, FAMILIES, VOCAB_SIZE, WINDOW, write_tiny_model

__all__ = ["EOS_TOKEN_ID", "FAMILIES", "VOCAB_SIZE", "WINDOW", "write_tiny_model"]
