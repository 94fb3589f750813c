"""How long a step will take, for deadlines only."""

from cp_layout.model_shape import ModelShape

PRIOR_FLOPS = 5e9
"""Speed assumed of a rank before anything was measured: deliberately slow."""

_WIDE = 32
"""Tokens from which a step's time is taken to grow with its tokens."""

_WEIGHT = 0.2


def prior_seconds_per_token(shape: ModelShape, tp: int) -> float:
    """2 FLOP per parameter of a rank that a token goes through, at PRIOR_FLOPS."""
    return 2 * (layer_parameters(shape) + shape.vocab_size * shape.hidden_size) / tp / PRIOR_FLOPS


def layer_parameters(shape: ModelShape) -> int:
    """Parameters of all layers that a token goes through."""
    return sum(_attention(shape) + _ffn(shape, layer) for layer in range(shape.num_layers))


def _attention(shape: ModelShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads
    q, out = heads * shape.query_head_dim, heads * shape.value_head_dim
    if shape.mla is None:
        return hidden * (q + out + 2 * shape.num_kv_heads * shape.head_dim)
    mla = shape.mla
    queries = hidden * q if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + q)
    return queries + hidden * (out + mla.latent_dim) + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)


def _ffn(shape: ModelShape, layer: int) -> int:
    if shape.moe is None or not shape.is_mixture(layer):
        return 3 * shape.hidden_size * shape.intermediate_size
    columns = shape.moe.experts_per_token * shape.moe.intermediate_size + shape.moe.shared_size
    return shape.hidden_size * (3 * columns + shape.moe.num_experts)


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
