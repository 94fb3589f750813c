"""Prompts on one side, outputs on another: what the tests of it share."""

from coordinator.app import Options
from cp_wire.pb import rank_pb2
from tests.coordinator.fake_rank import FakeRank

ONE = {"tp": 1, "pcp": 1, "dcp": 1}
FAIL = Options(recompute_lost_kv=False)
PROMPT = [*range(1, 40)]
TRANSIENT = rank_pb2.PullFailure(reason="CORRUPTED", message="damaged", transient=True)
FINAL = rank_pb2.PullFailure(reason="LEASE_ENDED", message="expired", transient=False)


def causes(counts) -> dict[str, int]:
    """Requests by the cause that their moves failed for."""
    return {each.cause: each.requests for each in counts}


def rows_of(rank: FakeRank, handle: int = 1) -> list[rank_pb2.StepRow]:
    """All rows of a request that a rank has computed, in order."""
    return [row for step in rank.steps for row in step.rows if row.handle == handle]
