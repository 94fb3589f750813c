"""What a step costs when it is computed in one way or another, from numbers that are the same for everybody.

A way is counted as `Work` of the rank that has most of it; `Rates` (seconds per unit of each kind) make seconds of it. Only who
decides uses this: ranks obey a plan and never look here.

Notation: P = pcp, N = dcp = P·d or 1, h = Q heads of a rank, H = h·d; S_q and S_ctx = new and cached tokens of the prefill
rows; e, e_o and e_kv = bytes of activations, partial outputs and cache. A query head has the width w_q, a partial output w_o
(both head_dim; latent attention: dc + dr, and dc or, with d = 1, dv if that is less), a token's KV in one layer of a rank w_kv
(2 · KV heads · head_dim; dc + dr). Per layer, of prefill rows, a rank receives

    gather Q     (N−1)/P · S_q · (h·(w_q·e + w_o·e_o + 4) + w_kv·e)             in 2 rounds
    gather KV    ((P−1)/P · S_q + (N−1)/N · S_ctx) · w_kv·e_kv                  in 1 round (P > 1), 1 per workspace of context

and moves in its own memory, with o = h·(w_o + 1)·e_o the partial output of a row,

    gather Q     (2N+1)/P · S_q · o + S_ctx/N · w_kv·e_kv                       partials out, N in, their merge out; keys in
    gather KV    (1 + 4·pieces)/P · S_q · o + (1 + 1/N) · S_ctx · w_kv·e_kv     the same of each piece; own keys out, all in

(partials come back in one round; the merge ag_rs takes two, in the first of which each member has the log-sum-exps of all, N·4
instead of 4 bytes a head). By bytes alone gathering Q is cheaper once S_ctx > H·(w_q·e + w_o·e_o + 4)/(w_kv·e_kv) · S_q
(a little later for d > 1, as the new KV then goes to every rank of the DCP group, and where e ≠ e_kv). Both ways compute the
same pairs, and balance them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.model_shape import DTYPE_BYTES, ModelShape
from cp_layout.reorg import WORKSPACE_BYTES
from cp_layout.sums import received

COST_VERSION = 7
"""Changes whenever the same numbers may lead to another choice."""

PARTIAL_BYTES = 4
"""Bytes of an element of a partial output, and of its log-sum-exp: fp32."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step in global numbers: sums over its rows."""

    decode_rows: int = 0
    decode_context: int = 0
    """Tokens that the decode rows find in the cache."""
    prefill_rows: int = 0
    prefill_tokens: int = 0
    """S_q."""
    prefill_context: int = 0
    """S_ctx."""
    prefill_pairs: int = 0
    """(query, key ≤ query) pairs of the prefill rows, the context's keys included."""


class Work(NamedTuple):
    """Work of the rank that has most of it, over all layers of one step."""

    steps: float = 0.0
    linear_flops: float = 0.0
    weight_bytes: float = 0.0
    """Weights that are read."""
    attention_flops: float = 0.0
    cache_bytes: float = 0.0
    """KV that is read or copied, and partial outputs that are written or merged."""
    rounds: float = 0.0
    """Collectives in its layers."""
    wire_bytes: float = 0.0
    """What it receives in them."""

    def plus(self, other: "Work") -> "Work":
        """Element by element."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Rates(NamedTuple):
    """Seconds per unit of each kind of work; the defaults are priors of a CPU core with products of bf16, to be measured."""

    step: float = 5e-3
    linear_flop: float = 1 / 200e9
    weight_byte: float = 1 / 10e9
    attention_flop: float = 1 / 150e9
    cache_byte: float = 1 / 10e9
    round: float = 1e-4
    wire_byte: float = 1 / 1e9


def seconds(work: Work, rates: Rates) -> float:
    """Predicted time of a step."""
    return sum(amount * rate for amount, rate in zip(work, rates, strict=True))


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the work of a step depends on besides its numbers."""

    grid: Grid
    layers: int
    token_parameters: float
    """Parameters of a rank that a token is multiplied with, those of the vocabulary's head not counted."""
    head_parameters: float
    hidden_size: int
    heads: int
    """h."""
    query_width: int
    """w_q."""
    output_width: int
    """w_o."""
    pair_width: int
    """Multiplications of one (query, key) pair per head, with a query that can travel."""
    own_pair_width: int
    """The same where keys have come to the query: of latents they are expanded."""
    expansion: int
    """Multiplications per head that expanding one latent takes."""
    kv_width: int
    """w_kv."""
    activation_bytes: int
    """e."""
    cache_element_bytes: int
    """e_kv."""
    merge_rounds: int
    """Collectives that bring partial outputs back."""

    @classmethod
    def of(
        cls, shape: ModelShape, grid: Grid, parameters: float, dtype: str, kv_dtype: str, merge_rounds: int = 1
    ) -> "CostModel":
        """parameters: of the layers, of one replica, that a token is multiplied with. `LayoutError` for an unknown dtype."""
        for name in (dtype, kv_dtype):
            if name not in DTYPE_BYTES:
                raise LayoutError(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}")
        mla = shape.mla
        if mla is None:
            query = output = shape.head_dim
            pair, own_pair, expansion = 2 * shape.head_dim, 2 * shape.head_dim, 0
        else:
            query, output = mla.latent_dim, mla.kv_lora_rank
            if grid.dcp_in_tp == 1:
                output = min(output, mla.v_head_dim)
            pair, own_pair = mla.latent_dim + mla.kv_lora_rank, mla.qk_head_dim + mla.v_head_dim
            expansion = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        return cls(
            grid=grid,
            layers=shape.num_layers,
            token_parameters=parameters / grid.tp,
            head_parameters=shape.vocab_size * shape.hidden_size / grid.tp,
            hidden_size=shape.hidden_size,
            heads=shape.num_heads // grid.tp,
            query_width=query,
            output_width=output,
            pair_width=pair,
            own_pair_width=own_pair,
            expansion=expansion,
            kv_width=shape.kv_spec(grid.tp).elements,
            activation_bytes=DTYPE_BYTES[dtype],
            cache_element_bytes=DTYPE_BYTES[kv_dtype],
            merge_rounds=merge_rounds,
        )

    def replicated(self, facts: StepFacts) -> Work:
        """Every replica computes every row; partial outputs are merged over the shards."""
        rows = facts.decode_rows + facts.prefill_tokens
        drawn = facts.decode_rows + facts.prefill_rows
        return self._linear(rows, drawn).plus(self._everywhere(facts)).plus(self._sums(rows, self.grid.tp))

    def split(self, facts: StepFacts) -> Work:
        """Decode rows only: every replica computes its part of every matrix, and what that takes to put together."""
        p, rows = self.grid.pcp, facts.decode_rows
        whole = self._linear(rows, rows)
        part = whole._replace(linear_flops=whole.linear_flops / p, weight_bytes=whole.weight_bytes / p)
        gathered = (p - 1) / p * rows * (self.heads * self.query_width + self.kv_width) * self.activation_bytes
        gather = self._per_layer(Work(rounds=1, wire_bytes=gathered))
        return part.plus(gather).plus(self._everywhere(facts)).plus(self._sums(rows, self.grid.tp * p))

    def owner_q(self, facts: StepFacts) -> Work:
        """Rows are dealt out, and all of them go to the keys; dcp > 1."""
        return self._dealt(facts).plus(self._per_layer(self._queries_go(facts)))

    def owner_kv(self, facts: StepFacts) -> Work:
        """Rows are dealt out; keys go to the prefill rows, decode rows to the keys (with dcp = 1 theirs are where they are)."""
        p, n = self.grid.pcp, self.grid.dcp
        prefill = self._keys_come(facts.prefill_context, facts.prefill_tokens, self._prefill_flops(facts))
        alone = StepFacts(decode_rows=facts.decode_rows, decode_context=facts.decode_context)
        work = self._per_layer(prefill).plus(self._dealt(facts))
        if n > 1:
            return work.plus(self._per_layer(self._queries_go(alone)))
        decode = Work(
            cache_bytes=facts.decode_context / p * self._kv_bytes,
            attention_flops=(facts.decode_context + facts.decode_rows) / p * self._pair_flops(1),
        )
        return work.plus(self._per_layer(decode))

    def owner_kv_all(self, facts: StepFacts) -> Work:
        """Rows are dealt out, and keys go to all of them; dcp > 1."""
        # A decode row has one query: its keys are attended as they are.
        decode_pairs = (facts.decode_context + facts.decode_rows) * self._owned(facts) / max(facts.decode_rows, 1)
        flops = self._prefill_flops(facts) + decode_pairs * self._pair_flops(1)
        context, new = facts.prefill_context + facts.decode_context, facts.prefill_tokens + facts.decode_rows
        return self._per_layer(self._keys_come(context, new, flops)).plus(self._dealt(facts))

    @property
    def workspace_tokens(self) -> int:
        """Cached tokens that one round of a KV gather brings, over all shards."""
        return max(1, WORKSPACE_BYTES // self._kv_bytes)

    @property
    def _d(self) -> int:
        return self.grid.dcp_in_tp

    @property
    def _kv_bytes(self) -> int:
        """Bytes of one cached token in one layer."""
        return self.kv_width * self.cache_element_bytes

    @property
    def _partial_bytes(self) -> int:
        """Bytes of a row's partial output, with this rank's heads, in one layer."""
        return self.heads * (self.output_width + 1) * PARTIAL_BYTES

    def _returned_bytes(self, members: int) -> int:
        """Of the same as it comes from another member. members: whose log-sum-exps come along where two rounds merge it."""
        return self.heads * (self.output_width + (members if self.merge_rounds > 1 else 1)) * PARTIAL_BYTES

    def _pair_flops(self, members: int) -> float:
        """Of one (query, key) pair in one layer, with the heads of so many TP members."""
        return 2.0 * self.heads * members * self.pair_width

    def _prefill_flops(self, facts: StepFacts) -> float:
        """Of a replica's part of the prefill rows in a layer, over keys that are all here: as they are, or expanded if less."""
        pairs, keys = facts.prefill_pairs / self.grid.pcp, facts.prefill_context + facts.prefill_tokens
        expanded = 2.0 * self.heads * (pairs * self.own_pair_width + keys * self.expansion)
        return min(pairs * self._pair_flops(1), expanded)

    def _queries_go(self, facts: StepFacts) -> Work:
        """Of one layer: queries and new KV are gathered, every shard is attended for all, partials go back and are merged."""
        n, context = self.grid.dcp, facts.prefill_context + facts.decode_context
        mine = facts.prefill_tokens / self.grid.pcp + self._owned(facts)
        row = (self.heads * self.query_width + self.kv_width) * self.activation_bytes + self._returned_bytes(n)
        return Work(
            rounds=(1 + self.merge_rounds) * (mine > 0),
            wire_bytes=(n - 1) * mine * row,
            cache_bytes=context / n * self._kv_bytes + (2 * n + 1) * mine * self._partial_bytes,
            attention_flops=(facts.prefill_pairs + facts.decode_context + facts.decode_rows) / n * self._pair_flops(self._d),
        )

    def _keys_come(self, context: int, new: int, attention_flops: float) -> Work:
        """Of one layer: keys of so many cached and new tokens are gathered and attended."""
        p, n = self.grid.pcp, self.grid.dcp
        pieces = -(-context // self.workspace_tokens) if n > 1 else 0
        # Every shard reads its own keys for all; partials of a piece are written, and merged with those of all before it.
        copies = 1 + 1 / n if n > 1 else 1
        partials = (1 + 4 * pieces) * new / p * self._partial_bytes if n > 1 else 0
        return Work(
            rounds=((p > 1) + pieces) * (new > 0),
            wire_bytes=((p - 1) / p * new + (n - 1) / n * context) * self._kv_bytes,
            cache_bytes=copies * context * self._kv_bytes + partials,
            attention_flops=attention_flops,
        )

    def _per_layer(self, work: Work) -> Work:
        return Work(*(amount * self.layers for amount in work))

    def _owned(self, facts: StepFacts) -> int:
        """Decode rows of the replica that has most of them."""
        return -(-facts.decode_rows // self.grid.pcp)

    def _linear(self, rows: float, drawn: float) -> Work:
        return Work(
            steps=1,
            linear_flops=2 * (rows * self.token_parameters + drawn * self.head_parameters),
            weight_bytes=(self.token_parameters + self.head_parameters) * self.activation_bytes,
        )

    def _dealt(self, facts: StepFacts) -> Work:
        """Linear layers of rows that are dealt out."""
        rows = facts.prefill_tokens / self.grid.pcp + self._owned(facts)
        return self._linear(rows, self._owned(facts) + facts.prefill_rows / self.grid.pcp).plus(self._sums(rows, self.grid.tp))

    def _sums(self, rows: float, ranks: int) -> Work:
        """Two sums of hidden states per layer."""
        if ranks == 1:
            return Work()
        return self._per_layer(Work(rounds=2, wire_bytes=2 * received(ranks, rows * self.hidden_size * self.activation_bytes)))

    def _everywhere(self, facts: StepFacts) -> Work:
        """Attention of rows that every replica has, each against its shard."""
        n, rows = self.grid.dcp, facts.decode_rows + facts.prefill_tokens
        context = facts.decode_context + facts.prefill_context
        pairs = facts.prefill_pairs + facts.decode_context + facts.decode_rows
        queries = (self._d - 1) * rows * self.heads * self.query_width * self.activation_bytes
        merged = (self._d + n + 1) * rows * self._partial_bytes if n > 1 else 0
        return self._per_layer(
            Work(
                rounds=(self._d > 1) + self.merge_rounds * (n > 1),
                wire_bytes=queries + (n - 1) * rows * self._returned_bytes(self._d),
                cache_bytes=context / n * self._kv_bytes + merged,
                attention_flops=pairs / n * self._pair_flops(self._d),
            )
        )
