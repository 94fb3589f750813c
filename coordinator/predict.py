"""How long a step will take, for deadlines only."""

from cp_layout.cost import CostModel, StepFacts
from cp_layout.model_shape import ModelShape

PRIOR_FLOPS = 5e9
"""Speed assumed of a rank before anything was measured: deliberately slow."""

_WIDE = 32
"""Tokens from which a step's time is taken to grow with its tokens."""

_WEIGHT = 0.2

_FIXED, _TOKENS, _PREFILL_PAIRS, _DECODE_PAIRS = range(4)


def prior_seconds_per_token(shape: ModelShape, tp: int) -> float:
    """2 FLOP per parameter of a rank that a token goes through, at PRIOR_FLOPS."""
    return 2 * (layer_parameters(shape) + shape.vocab_size * shape.hidden_size) / tp / PRIOR_FLOPS


def prior_seconds_per_pair(model: CostModel) -> float:
    """A rank's heads over one (query, key) pair in all layers, at PRIOR_FLOPS; as if the pairs were not divided."""
    return 2 * model.layers * model.heads * model.pair_width / PRIOR_FLOPS


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
    """seconds ≈ fixed + tokens · a + (prefill pairs) · b + (decode pairs) · c, with rates that follow what ranks reported.

    A report above the prediction raises the rates at once, one below it lowers them slowly, and of a step's parts only the
    largest: so `predict` is never below the last report of a step with the same facts, and a rate that a step hardly used
    keeps what other steps taught. It grows with each of the facts.

    per_token_s, per_pair_s: rates before anything was measured; the first step of many tokens replaces that of tokens.
    """

    def __init__(self, per_token_s: float, per_pair_s: float) -> None:
        self._rates = [0.0, per_token_s, per_pair_s, per_pair_s]
        self._measured = False

    def predict(self, facts: StepFacts) -> float:
        """Seconds a step is expected to take on its slowest rank."""
        return self._rates[_FIXED] + sum(self._parts(facts)[_TOKENS:])

    def observe(self, facts: StepFacts, seconds: float) -> None:
        """Takes in what the slowest rank needed for a step."""
        tokens = _tokens(facts)
        base = _TOKENS if tokens >= _WIDE else _FIXED
        if base == _TOKENS and not self._measured:
            self._rates[_TOKENS], self._measured = seconds / tokens, True
            return
        parts = self._parts(facts)
        used = (base, _PREFILL_PAIRS, _DECODE_PAIRS)
        excess = seconds - sum(parts[part] for part in used)
        largest = max(used, key=parts.__getitem__)
        if excess < 0:
            self._scale(largest, parts[largest], _WEIGHT * excess)
            return
        # Pairs at most double, lest a slow step with next to no context makes context dear.
        pairs = min(excess, parts[largest]) if largest != base else 0.0
        self._scale(largest, parts[largest], pairs)
        if base == _FIXED:
            self._rates[_FIXED] += excess - pairs
        else:
            self._rates[_TOKENS] += (excess - pairs) / tokens

    def _parts(self, facts: StepFacts) -> list[float]:
        amounts = (1, _tokens(facts), facts.prefill_pairs, facts.decode_context)
        return [amount * rate for amount, rate in zip(amounts, self._rates, strict=True)]

    def _scale(self, part: int, seconds: float, more_s: float) -> None:
        """Makes a part of a step, now so many seconds, longer or shorter."""
        if seconds > 0:
            self._rates[part] *= 1 + more_s / seconds


def _tokens(facts: StepFacts) -> int:
    return facts.decode_rows + facts.prefill_tokens
