"""What became of requests, and how many tokens they brought and took away."""

from collections import Counter
from dataclasses import dataclass, field

from cp_wire.pb import coordinator_pb2

CANCELLED = "cancelled"
"""Outcome of a call whose client left before its end."""


@dataclass(slots=True)
class RequestStats:
    """Counters since the coordinator started."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Calls by how they ended: stop, length, abort, CANCELLED, or the name of a status in lower case; a closed set of words."""
    prompt_tokens: int = 0
    """Of accepted requests; a prompt with several completions counts once."""
    output_tokens: int = 0
    """Sent, over all completions."""

    def report(self) -> coordinator_pb2.RequestCounts:
        """As a message; outcomes in alphabetical order."""
        return coordinator_pb2.RequestCounts(
            outcomes=[
                coordinator_pb2.OutcomeCount(outcome=outcome, requests=number)
                for outcome, number in sorted(self.outcomes.items())
            ],
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )
