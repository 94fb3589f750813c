"""How long a step will take, for deadlines only."""

from cp_layout.model_shape import ModelShape

PRIOR_FLOPS = 5e9
"""Speed assumed of a rank before anything was measured: deliberately slow."""

_WIDE = 32
"""Tokens from which a step's time is taken to grow with its tokens."""

_WEIGHT = 0.2


def prior_seconds_per_token(shape: ModelShape, tp: int) -> float:
    """2 FLOP per parameter a rank holds, at PRIOR_FLOPS."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * q + 2 * kv + 3 * shape.intermediate_size)
    return 2 * (shape.num_layers * layer + shape.vocab_size * shape.hidden_size) / tp / PRIOR_FLOPS


class StepPredictor:
    """seconds ≈ fixed + tokens · per_token, moving averages of what ranks reported; the first report replaces the prior."""

    def __init__(self, per_token_s: float) -> None:
        self._per_token_s = per_token_s
        self._fixed_s = 0.0
        self._measured = False

    def predict(self, tokens: int) -> float:
        """Seconds a step of so many tokens is expected to take on its slowest rank."""
        return self._fixed_s + tokens * self._per_token_s

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes in what the slowest rank needed for a step."""
        if tokens < _WIDE:
            self._fixed_s += _WEIGHT * (seconds - self._fixed_s)
        elif self._measured:
            self._per_token_s += _WEIGHT * (seconds / tokens - self._per_token_s)
        else:
            self._per_token_s, self._measured = seconds / tokens, True
