"""What has been moved between sets since the coordinator started, and what became of what could not be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_wire.pb import coordinator_pb2, rank_pb2


@dataclass(slots=True)
class TransferStats:
    """Counters over all requests. requests: whose KV came over as a whole."""

    requests: int = 0
    ranges: int = 0
    messages: int = 0
    payload_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    """Requests by the cause for which the output's set computed what was to come."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests by the cause that ended them."""

    def moved(self, answers: Sequence[rank_pb2.PullResponse], seconds: float) -> None:
        """A range came over; answers: of the ranks that took it."""
        self.ranges += 1
        self.seconds += seconds
        for answer in answers:
            self.messages += answer.messages
            self.payload_bytes += answer.payload_bytes
            self.shared_bytes += answer.shared_bytes
            self.retries += answer.retries

    def report(self) -> coordinator_pb2.TransferStatus:
        """As a message; causes in alphabetical order."""
        return coordinator_pb2.TransferStatus(
            requests=self.requests,
            ranges=self.ranges,
            messages=self.messages,
            payload_bytes=self.payload_bytes,
            shared_bytes=self.shared_bytes,
            seconds=self.seconds,
            retries=self.retries,
            recomputed=_causes(self.recomputed),
            failed=_causes(self.failed),
        )


def _causes(counts: Counter[str]) -> list[coordinator_pb2.CauseCount]:
    return [coordinator_pb2.CauseCount(cause=cause, requests=number) for cause, number in sorted(counts.items())]
