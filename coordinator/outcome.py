"""The answers of all ranks to one step, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.faults import BadAnswer
from coordinator.plan import Row, ScheduledStep
from coordinator.step_run import Answer
from cp_wire.pb import common_pb2


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
    collective_s: float
    """Time in collectives of the rank that spent least there: of all it is the one that waited least for others."""


def check_tables(tables: Sequence[int], members: Mapping[int, int], answers: Sequence[Answer]) -> None:
    """Raises BadAnswer when a rank holds another number of blocks than the books say: it reads or writes somebody else's.

    tables: by pool member. members: pool member by rank.
    """
    for lane, response in answers:
        held, expected = response.step.blocks_in_use, tables[members[lane.rank]]
        if held != expected:
            raise BadAnswer(lane.rank, f"its block tables hold {held} blocks, they should hold {expected}")


def put_together(step: ScheduledStep, ticket: int, answers: Sequence[Answer]) -> Outcome:
    """answers: see `StepRun.step`. Raises BadAnswer when the ranks disagree, or answer anything but what the step asks."""
    sampled: dict[int, int] = {}
    failed: dict[int, str] = {}
    logprobs: dict[int, common_pb2.PositionLogprobs] = {}
    scores: dict[int, dict[int, common_pb2.PositionLogprobs]] = {}
    first = answers[0][0].rank
    for lane, response in answers:
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
        for each in response.step.scores:
            scored = scores.setdefault(each.handle, {})
            for position, of_position in enumerate(each.positions, start=each.start):
                if position in scored:
                    raise BadAnswer(lane.rank, f"step {ticket} scored position {position} of a prompt twice")
                scored[position] = of_position
    rows = {row.handle: row for row in step.rows}
    drawing = {handle for handle, row in rows.items() if row.sample}
    if not (sampled.keys() <= drawing <= sampled.keys() | failed.keys() <= rows.keys()):
        raise BadAnswer(first, f"step {ticket} wanted {len(drawing)} draws and got {len(sampled) + len(failed)} others")
    # One rank may fail a row that another one has drawn for, or scored in part.
    sampled = {handle: token for handle, token in sampled.items() if handle not in failed}
    in_order = {handle: dict(sorted(scored.items())) for handle, scored in scores.items() if handle not in failed}
    asked = {handle: _scored_positions(row) for handle, row in rows.items() if row.score_token_ids and handle not in failed}
    if {handle: list(positions) for handle, positions in in_order.items()} != asked:
        wanted = sum(map(len, asked.values()))
        raise BadAnswer(first, f"step {ticket} wanted {wanted} prompt scores and got others")
    of_prompts = {handle: list(positions.values()) for handle, positions in in_order.items()}
    rank_s = max(response.worker_us for _, response in answers) / 1e6
    collective_s = min(response.step.collective_us for _, response in answers) / 1e6
    return Outcome(sampled, failed, logprobs, of_prompts, rank_s, collective_s)


def _scored_positions(row: Row) -> list[int]:
    return list(range(row.score_start, row.score_start + len(row.score_token_ids)))
