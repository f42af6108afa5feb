"""Sampling defaults that a model brings along in its generation_config.json: in force where a client leaves the field out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import generation_pb2

_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """As vLLM takes them: these five and max_new_tokens, each only where the file has it; do_sample is not looked at, temperature 0 is greedy."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """By the names of SamplingParams' fields."""
    max_tokens: int | None = None

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> ModelDefaults:
        """Reads the parsed file. Raises ValueError for a value that is no number of the field's kind."""
        sampling: dict[str, float | int] = {name: _number(generation_config, name) for name in _REAL if generation_config.get(name) is not None}
        if generation_config.get("top_k") is not None:
            sampling["top_k"] = _whole_number(generation_config, "top_k", least=-1)
        has_length = generation_config.get("max_new_tokens") is not None
        return cls(sampling, _whole_number(generation_config, "max_new_tokens", least=1) if has_length else None)

    def as_params(self) -> generation_pb2.SamplingParams:
        """The sampling defaults as a message, to be checked like a client's."""
        params = generation_pb2.SamplingParams()
        for name, value in self.sampling.items():
            setattr(params, name, value)
        return params

    def __str__(self) -> str:
        named = {**self.sampling, **({"max_new_tokens": self.max_tokens} if self.max_tokens is not None else {})}
        return ", ".join(f"{name} {value:g}" for name, value in named.items()) or "none"


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}, which is no number")
    return float(value)


def _whole_number(config: Mapping[str, Any], name: str, *, least: int) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r}, which is no number of tokens")
    return value
