"""How the replicas of a set share a step: one decision per step, from numbers that are the same for everybody.

Pure policy. The ranks find the decision in the plan and obey.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.plan import NOTHING_CHOSEN, DecodeMode, Gather, Row
from coordinator.request import Request
from cp_layout.cost import COST_VERSION, CostModel, Rates, StepFacts, Work, seconds


def computable(latent: bool) -> frozenset[DecodeMode]:
    """The ways that ranks can compute a step in; latent: of a model with latent attention."""
    return frozenset(DecodeMode) - {DecodeMode.SPLIT} if latent else frozenset(DecodeMode)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The shape of a set as far as the choice depends on it, and what is allowed to be chosen."""

    pcp: int = 1
    dcp: int = 1
    ways: frozenset[DecodeMode] = frozenset({DecodeMode.REPLICATED})
    """What ranks can do; REPLICATED is always among it."""
    gather: Gather = Gather.NONE
    """What rows have to gather (Q, KV: prefill rows); NONE = whatever is cheaper."""
    latent: bool = False
    """Whether a token's KV is one latent."""

    @property
    def latents_travel(self) -> bool:
        """Whether latents can be gathered for any row."""
        return self.latent and self.dcp > 1 and DecodeMode.OWNER in self.ways

    @property
    def owner_keeps_output(self) -> bool:
        """Whether the KV of tokens that their owner decoded lies with it alone (see `coordinator.owners`)."""
        return self.pcp > 1 and self.dcp == 1


GATHERS = {"auto": Gather.NONE, "q": Gather.Q, "kv": Gather.KV}
"""`Replicas.gather` by the name that the configuration has for prefill rows."""

LATENT_GATHERS = {"q": Gather.Q, "kv": Gather.KV_ALL}
"""The same by its name for latents; decode rows are bound too."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What work is worth."""

    model: CostModel
    rates: Rates

    def seconds(self, work: Work) -> float:
        """Predicted time of a step."""
        return seconds(work, self.rates)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the plan says about it."""

    decode_mode: DecodeMode = DecodeMode.REPLICATED
    gather: Gather = Gather.NONE
    cost_version: int = NOTHING_CHOSEN


def facts_of(rows: Iterable[Row], requests: Mapping[int, Request]) -> StepFacts:
    """Sums over the rows of a step; requests by handle."""
    decode = decode_context = prefill = tokens = context = pairs = 0
    for row in rows:
        if row.start >= requests[row.handle].num_prefill_tokens:
            decode += 1
            decode_context += row.start
        else:
            count = len(row.token_ids)
            prefill += 1
            tokens += count
            context += row.start
            pairs += count * row.start + count * (count + 1) // 2
    return StepFacts(decode, decode_context, prefill, tokens, context, pairs)


def choose(facts: StepFacts, replicas: Replicas, prices: Prices | None = None, bound: bool = False) -> Choice:
    """OWNER when rows can be dealt out: prefill rows, or at least as many decode rows as replicas. Below that SPLIT or
    REPLICATED, whatever costs less. Latents go to all rows instead where that costs less.

    prices: None = nothing is known, then SPLIT and gather Q. bound: a row can be computed by its owner alone.
    """
    everywhere = Choice(DecodeMode.OWNER, Gather.KV_ALL)
    if not (replicas.latents_travel and facts.decode_rows + facts.prefill_rows):
        return _queries_to_decode(facts, replicas, prices, bound)
    if replicas.gather is Gather.KV_ALL:
        return everywhere
    choice = _queries_to_decode(facts, replicas, prices, bound)
    if prices is None or replicas.gather is not Gather.NONE or not facts.decode_rows:
        return choice
    less = min(choice, everywhere, key=lambda each: prices.seconds(work_of(each, facts, prices.model)))
    return replace(less, cost_version=COST_VERSION)


def _queries_to_decode(facts: StepFacts, replicas: Replicas, prices: Prices | None, bound: bool) -> Choice:
    if replicas.pcp == 1:
        return _one_replica(facts, replicas, prices)
    dealt = facts.prefill_rows > 0 or facts.decode_rows >= replicas.pcp or bound
    if dealt and DecodeMode.OWNER in replicas.ways:
        return _owner(facts, replicas, prices)
    if not facts.decode_rows or facts.prefill_rows or DecodeMode.SPLIT not in replicas.ways:
        return Choice()
    if prices is None:
        return Choice(DecodeMode.SPLIT)
    split, replicated = (prices.seconds(way(facts)) for way in (prices.model.split, prices.model.replicated))
    mode = DecodeMode.SPLIT if split <= replicated else DecodeMode.REPLICATED
    return Choice(mode, cost_version=COST_VERSION)


def _one_replica(facts: StepFacts, replicas: Replicas, prices: Prices | None) -> Choice:
    """Nobody to share with. But latents, all of which every TP member needs, may be gathered where prefill rows read them."""
    if not (replicas.latents_travel and facts.prefill_rows) or replicas.gather is Gather.Q:
        return Choice()
    if replicas.gather is Gather.KV:
        return Choice(DecodeMode.OWNER, Gather.KV)
    if prices is None:
        return Choice()
    q, kv = (prices.seconds(way(facts)) for way in (prices.model.replicated, prices.model.owner_kv))
    return Choice(DecodeMode.OWNER, Gather.KV, COST_VERSION) if kv < q else Choice(cost_version=COST_VERSION)


def work_of(choice: Choice, facts: StepFacts, model: CostModel) -> Work:
    """What the cost model says about a step that was computed this way."""
    match choice.decode_mode:
        case DecodeMode.REPLICATED:
            return model.replicated(facts)
        case DecodeMode.SPLIT:
            return model.split(facts)
        case DecodeMode.OWNER:
            if choice.gather is Gather.KV_ALL:
                return model.owner_kv_all(facts)
            return model.owner_q(facts) if choice.gather is Gather.Q else model.owner_kv(facts)


def _owner(facts: StepFacts, replicas: Replicas, prices: Prices | None) -> Choice:
    if not facts.prefill_rows:
        return Choice(DecodeMode.OWNER)
    if replicas.dcp == 1:
        return Choice(DecodeMode.OWNER, Gather.KV)
    if replicas.gather is not Gather.NONE:
        return Choice(DecodeMode.OWNER, replicas.gather)
    if prices is None:
        return Choice(DecodeMode.OWNER, Gather.Q)
    q, kv = (prices.seconds(way(facts)) for way in (prices.model.owner_q, prices.model.owner_kv))
    return Choice(DecodeMode.OWNER, Gather.Q if q <= kv else Gather.KV, COST_VERSION)
