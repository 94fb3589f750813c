"""The answers of all ranks to one step, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.faults import BadAnswer
from coordinator.lane import Lane
from coordinator.plan import ScheduledStep
from cp_wire.pb import common_pb2, rank_pb2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step brought, by handle."""

    sampled: Mapping[int, int]
    failed: Mapping[int, str]
    """Rows that failed alone; nothing else is said about their requests."""
    logprobs: Mapping[int, common_pb2.PositionLogprobs]
    scores: Mapping[int, Sequence[common_pb2.PositionLogprobs]]
    """Log-probabilities of the prompt tokens that the row scores."""
    rank_s: float
    """The slowest rank's own time."""


def put_together(
    step: ScheduledStep, ticket: int, lanes: Sequence[Lane], responses: Sequence[rank_pb2.ExecuteResponse]
) -> Outcome:
    """Raises BadAnswer when the ranks disagree, or answer anything but what the step asks."""
    sampled: dict[int, int] = {}
    failed: dict[int, str] = {}
    logprobs: dict[int, common_pb2.PositionLogprobs] = {}
    scores: dict[int, Sequence[common_pb2.PositionLogprobs]] = {}
    for lane, response in zip(lanes, responses, strict=True):
        if response.step.ticket != ticket:
            raise BadAnswer(lane.rank, f"the result of step {ticket} says step {response.step.ticket}")
        for token in response.step.sampled:
            if token.error:
                failed[token.handle] = token.error
                continue
            if sampled.setdefault(token.handle, token.token_id) != token.token_id:
                raise BadAnswer(lane.rank, f"step {ticket} was sampled twice with different tokens")
            if token.HasField("logprobs"):
                logprobs[token.handle] = token.logprobs
        scores.update((each.handle, each.positions) for each in response.step.scores)
    rows = {row.handle: row for row in step.rows}
    drawing = {handle for handle, row in rows.items() if row.sample}
    if not (sampled.keys() <= drawing <= sampled.keys() | failed.keys() <= rows.keys()):
        raise BadAnswer(lanes[0].rank, f"step {ticket} wanted {len(drawing)} draws and got {len(sampled) + len(failed)} others")
    asked = {handle: len(row.score_token_ids) for handle, row in rows.items() if row.score_token_ids and handle not in failed}
    if asked != {handle: len(positions) for handle, positions in scores.items()}:
        raise BadAnswer(lanes[0].rank, f"step {ticket} wanted {sum(asked.values())} prompt scores and got others")
    return Outcome(sampled, failed, logprobs, scores, max(response.worker_us for response in responses) / 1e6)
