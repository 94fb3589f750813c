"""Which replica a running request belongs to, and which of its KV the others have.

With pcp > 1 and dcp = 1 the KV is not cut: prompts are copied to every replica, but what an owner decodes it keeps to itself.
Such a request is *bound* until it is admitted anew, and the prefix cache, which speaks for all replicas, must not name that KV.
"""

from collections.abc import Iterable, Mapping

from coordinator.choice import Choice, Replicas
from coordinator.plan import DecodeMode, Row
from coordinator.request import Request


class Owners:
    """Books of one scheduling set; everything costs O(replicas), or O(rows) where rows are given."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
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

    def bind(self, choice: Choice, rows: Iterable[Row], requests: Mapping[int, Request]) -> None:
        """A step with these rows is about to run; requests by handle."""
        if choice.decode_mode is DecodeMode.OWNER and self._replicas.owner_keeps_output:
            for row in rows:
                request = requests[row.handle]
                request.is_bound |= row.start >= request.num_prefill_tokens

    def num_shared(self, request: Request) -> int:
        """Computed tokens, from the first on, whose KV is where the layout says for every replica."""
        if self._replicas.owner_keeps_output:
            return min(request.num_computed, request.num_prefill_tokens)
        return request.num_computed
