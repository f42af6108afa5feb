"""The gateway's limits, by the names that operators know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for."""

    max_new_tokens: int | None = None
    """Most tokens of a completion, and its default; None: what is left of the context."""
    max_samples: int = 16
    """Highest n."""
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 256
    max_logprobs: int = 20
    """Most alternatives of a position, in the completion and in the prompt."""
    max_logit_biases: int = 1024
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_bad_words_ids: int = 256
    """Most runs of token ids, those that bad words become counted."""
    max_bad_word_tokens: int = 64
    """Longest of these runs."""
    max_messages: int = 1024


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What runs, and what may wait. Tokens are KV tokens: prompt and reserved output."""

    max_active_requests: int = 1024
    max_total_kv_tokens: int | None = None
    """None: what the pools hold."""
    max_prefill_backlog_tokens: int = 4096
    """A request is sent on only while the instance that computes its prompt has at most this many prompt tokens ahead."""
    max_queue_requests: int = 512
    max_queue_tokens: int = 2_000_000
    max_queue_time_s: float = 60.0
