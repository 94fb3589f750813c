"""Repetition, presence and frequency penalties over the tokens of one request."""

import torch
from torch import Tensor


class TokenHistory:
    """Which tokens a request has, kept incrementally: on the one rank that samples, for requests with penalties.

    Which tokens occur at all, in prompt or output, decides the repetition penalty; how often in the output alone decides the
    presence and frequency penalties. Memory: at most 5 bytes per id of the vocabulary, whatever the length.

    repetition: 1 = off, presence and frequency: 0 = off. Tokens from position num_prompt_tokens on are output.
    """

    def __init__(
        self,
        repetition: float,
        presence: float,
        frequency: float,
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._num_prompt_tokens = num_prompt_tokens
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device) if repetition != 1 else None
        counted = presence != 0 or frequency != 0
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device=device) if counted else None

    def take(self, start: int, token_ids: Tensor) -> None:
        """Tokens [T] int64 at positions start, start + 1, …; each position is to be taken once."""
        if self._seen is not None:
            self._seen[token_ids.to(self._seen.device)] = True
        if self._counts is not None:
            output = token_ids[max(self._num_prompt_tokens - start, 0) :].to(self._counts.device)
            self._counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def penalised(self, logits: Tensor) -> Tensor:
        """Logits [V] after the repetition penalty (positive ones divided by it, negative ones multiplied), then minus
        frequency × count and minus presence where the count is not 0; the argument stays as it is."""
        if self._seen is not None:
            repeated = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = torch.where(self._seen, repeated, logits)
        if self._counts is not None:
            logits = logits - self._frequency * self._counts - self._presence * (self._counts > 0)
        return logits
