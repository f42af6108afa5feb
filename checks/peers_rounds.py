"""Who is measured when: servers by turns, A B B A, never two at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checks.peers_results import TANDEM, TRANSFORMERS, VLLM


@dataclass(frozen=True, slots=True)
class Phase:
    """A server from its start to its end."""

    server: str
    rounds: tuple[int, ...]
    """That it is measured in, one behind the other."""


def phases(num_rounds: int, *, with_transformers: bool) -> Sequence[Phase]:
    """Each round has every server once and the next one has them in the opposite order; a server that ends a round and begins the next is not started anew.

    transformers stands between the two, next to both.
    """
    order = [TANDEM, *([TRANSFORMERS] if with_transformers else []), VLLM]
    visits = [(server, each) for each in range(num_rounds) for server in (order if each % 2 == 0 else order[::-1])]
    found: list[Phase] = []
    for server, each in visits:
        if found and found[-1].server == server:
            found[-1] = Phase(server, (*found[-1].rounds, each))
        else:
            found.append(Phase(server, (each,)))
    return found
