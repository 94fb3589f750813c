"""Which replica a running request belongs to, which of its KV the others have, and what that means for a step.

With pcp > 1 and dcp = 1 the KV is not cut: prompts are copied to every replica, but what an owner decodes it keeps to itself.
Such a request is *bound* until it is admitted anew, and the prefix cache, which speaks for all replicas, must not name that KV.
"""

from collections.abc import Mapping, Sequence

from coordinator.choice import Choice, Replicas, choose, facts_of
from coordinator.plan import DecodeMode, Row
from coordinator.pricing import Pricing
from coordinator.request import Request
from cp_layout.cost import StepFacts


class Owners:
    """Books of one scheduling set; everything costs O(replicas), or O(rows) where rows are given."""

    def __init__(self, replicas: Replicas, pricing: Pricing | None = None) -> None:
        self._replicas = replicas
        self._pricing = pricing
        self.clear()

    def clear(self) -> None:
        """Nobody runs."""
        self._requests = [0] * self._replicas.pcp

    def admit(self, request: Request) -> None:
        """Chooses the replica with the fewest running requests, ties to the lowest index, until `release`."""
        request.owner = self._requests.index(min(self._requests))
        request.num_prefill_tokens, request.is_bound = request.num_known, False
        self._requests[request.owner] += 1

    def release(self, request: Request) -> None:
        """The request does not run any more."""
        self._requests[request.owner] -= 1

    def decide(self, rows: Sequence[Row], requests: Mapping[int, Request]) -> tuple[Choice, StepFacts]:
        """How a step with these rows, which is about to run, is computed; requests by handle."""
        facts = facts_of(rows, requests)
        prices = None if self._pricing is None else self._pricing.prices
        choice = choose(facts, self._replicas, prices, bound=any(requests[row.handle].is_bound for row in rows))
        if choice.decode_mode is DecodeMode.OWNER and self._replicas.owner_keeps_output:
            for row in rows:
                request = requests[row.handle]
                request.is_bound |= row.start >= request.num_prefill_tokens
        return choice, facts

    def num_shared(self, request: Request) -> int:
        """Computed tokens, from the first on, whose KV is where the layout says for every replica."""
        if self._replicas.owner_keeps_output:
            return min(request.num_computed, request.num_prefill_tokens)
        return request.num_computed
