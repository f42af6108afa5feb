"""Log probabilities of a prompt, collected while a prefill instance computes it."""

from __future__ import annotations

from collections.abc import Sequence

from decode_svc.job import Job
from engine.proto import prompt_logprobs_from_proto
from kvtransfer.errors import HandoverProtocolError
from tandem.v1 import generation_pb2


class PromptLogprobs:
    """Those of one attempt: they go out only once all are here, so that an attempt that fails in between tells none.

    Kept as messages, which take a fraction of what objects would, and no more than the prompt has tokens.
    """

    def __init__(self, job: Job, vocab_size: int) -> None:
        self.entries: list[generation_pb2.TokenLogprob] = []
        self._token_ids = job.prompt_token_ids[1 : job.num_prompt_logprobs + 1]
        self._vocab_size = vocab_size

    def take(self, entries: Sequence[generation_pb2.TokenLogprob]) -> None:
        """Adds the next ones. Raises HandoverProtocolError for others than those of the prompt, FieldError for what is no log probability."""
        due = self._token_ids[len(self.entries) : len(self.entries) + len(entries)]
        if due != tuple(token.token_id for token in prompt_logprobs_from_proto(entries, vocab_size=self._vocab_size)):
            raise HandoverProtocolError("prefill sent log probabilities of other tokens than the prompt's next ones")
        self.entries.extend(entries)

    def check_complete(self) -> None:
        """Raises HandoverProtocolError when some have not come."""
        if len(self.entries) != len(self._token_ids):
            raise HandoverProtocolError(f"prefill sent {len(self.entries)} of {len(self._token_ids)} log probabilities of the prompt")
