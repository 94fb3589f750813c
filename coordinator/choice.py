"""How the replicas of a set share a step: one decision per step, from numbers that are the same for everybody.

Pure policy. The ranks find the decision in the plan and obey.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.plan import NOTHING_CHOSEN, DecodeMode, Gather, Row
from coordinator.request import Request

COMPUTABLE = frozenset({DecodeMode.REPLICATED})
"""The ways that ranks can compute a step in."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The shape of a set as far as the choice depends on it, and what is allowed to be chosen."""

    pcp: int = 1
    dcp: int = 1
    ways: frozenset[DecodeMode] = COMPUTABLE
    """REPLICATED is always allowed."""
    gather: Gather = Gather.NONE
    """What prefill rows have to gather; NONE = whatever is cheaper."""

    @property
    def owner_keeps_output(self) -> bool:
        """Whether the KV of tokens that their owner decoded lies with it alone (see `coordinator.owners`)."""
        return self.pcp > 1 and self.dcp == 1


GATHERS = {"auto": Gather.NONE, "q": Gather.Q, "kv": Gather.KV}
"""`Replicas.gather` by the name in the configuration."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step in global numbers."""

    decode_rows: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    """S_q: new tokens of all prefill rows."""
    prefill_context: int = 0
    """S_ctx: tokens that the prefill rows find in the cache."""
    bound_rows: int = 0
    """Rows that only their owner can compute (see `Replicas.owner_keeps_output`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the plan says about it."""

    decode_mode: DecodeMode = DecodeMode.REPLICATED
    gather: Gather = Gather.NONE
    cost_version: int = NOTHING_CHOSEN


def facts_of(rows: Iterable[Row], requests: Mapping[int, Request]) -> StepFacts:
    """Sums over the rows of a step; requests by handle."""
    decode = prefill = tokens = context = bound = 0
    for row in rows:
        request = requests[row.handle]
        bound += request.is_bound
        if row.start >= request.num_prefill_tokens:
            decode += 1
        else:
            prefill += 1
            tokens += len(row.token_ids)
            context += row.start
    return StepFacts(decode, prefill, tokens, context, bound)


def choose(facts: StepFacts, replicas: Replicas) -> Choice:
    """OWNER when rows can be dealt out: prefill rows, or at least as many decode rows as replicas; SPLIT below that."""
    if replicas.pcp == 1:
        return Choice()
    dealt = facts.prefill_rows > 0 or facts.decode_rows >= replicas.pcp or facts.bound_rows > 0
    if dealt and DecodeMode.OWNER in replicas.ways:
        return Choice(DecodeMode.OWNER, _gather(facts, replicas))
    if facts.decode_rows and not facts.prefill_rows and DecodeMode.SPLIT in replicas.ways:
        return Choice(DecodeMode.SPLIT)
    return Choice()


def _gather(facts: StepFacts, replicas: Replicas) -> Gather:
    if not facts.prefill_rows:
        return Gather.NONE
    if replicas.dcp == 1:
        return Gather.KV
    return Gather.Q if replicas.gather is Gather.NONE else replicas.gather
