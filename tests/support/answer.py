"""What a Generate RPC of a decode worker sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.v1 import decode_pb2, generation_pb2


@dataclass
class Answer:
    """What a Generate RPC sent, with positions checked."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    """Token ids by sample, those of samples that sent none too once they have ended."""
    messages: list[decode_pb2.DecodeServiceGenerateResponse] = field(default_factory=list)
    first_position: int | None = None
    finishes: dict[int, generation_pb2.Finish] = field(default_factory=dict)
    prompt_logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)

    def take(self, response: decode_pb2.DecodeServiceGenerateResponse) -> None:
        """Adds a message."""
        self.messages.append(response)
        if response.prompt_logprobs:
            assert not self.samples, "the prompt was told behind a token"
            assert len(response.prompt_logprobs) <= 256
            self.prompt_logprobs.extend(response.prompt_logprobs)
        if response.token_ids or response.HasField("finish"):
            assert response.index not in self.finishes, "a sample went on behind its finish"
            tokens = self.samples.setdefault(response.index, [])
            if self.first_position is None:
                self.first_position = response.position
            assert response.position == self.first_position + len(tokens), "positions have a gap"
            tokens.extend(response.token_ids)
        if response.HasField("finish"):
            self.finishes[response.index] = response.finish

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample."""
        return self.samples.get(0, [])

    @property
    def streams(self) -> list[list[int]]:
        """Token ids of all samples, each of which has ended."""
        assert sorted(self.samples) == sorted(self.finishes) == list(range(len(self.samples)))
        return [self.samples[index] for index in range(len(self.samples))]

    @property
    def finish_reason(self) -> int:
        """Of the one sample, on the last message."""
        assert [message.HasField("finish") for message in self.messages] == [False] * (len(self.messages) - 1) + [True]
        return self.finishes[0].finish_reason

    @property
    def prompts(self) -> list[decode_pb2.PromptReport]:
        """How the prompt was computed, each time that it was."""
        return [message.prompt for message in self.messages if message.HasField("prompt")]

    @property
    def handover(self) -> decode_pb2.HandoverReport:
        """The one report of a hand-over."""
        (report,) = [message.handover for message in self.messages if message.HasField("handover")]
        return report

    @property
    def reservation(self) -> decode_pb2.Reservation:
        """The one reservation, which is on the first message."""
        assert [message.HasField("reservation") for message in self.messages] == [True] + [False] * (len(self.messages) - 1)
        return self.messages[0].reservation
