"""Turns of a conversation."""

from __future__ import annotations

from typing import TypedDict


class ChatMessage(TypedDict):
    """One turn, as the model's chat template knows them."""

    role: str
    """Who speaks: system, user, assistant or tool."""
    content: str
    """What is said. Special-token text in it stays text."""
