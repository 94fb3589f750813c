"""What the tests of rows dealt out over replicas share."""

import random

from coordinator.plan import DecodeMode, Gather
from cp_wire.pb import common_pb2
from tests.inproc import InprocCluster, Shape

B = 4
MODEL = {"heads": 8, "kv_heads": 2}
DEALT = frozenset({DecodeMode.REPLICATED, DecodeMode.OWNER})
GATHERS = {"q": Gather.Q, "kv": Gather.KV, "kv_all": Gather.KV_ALL}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(200) for _ in range(length)]


def dealt(tp: int, pcp: int, dcp: int, gather: str = "kv", **settings) -> Shape:
    """A cluster that computes every step in DECODE_MODE_OWNER unless always_owner=False."""
    settings = {"always_owner": True, "block_size": B, "interleave": B, "ways": DEALT} | settings
    return Shape(tp=tp, pcp=pcp, dcp=dcp, pcp_gather=GATHERS[gather], **settings)


def gathers(grid: tuple[int, int, int]) -> tuple[str, ...]:
    """What prefill rows may gather: queries only where the cache is sharded."""
    return ("q", "kv") if grid[2] > 1 else ("kv",)


def check_dealt(running: InprocCluster) -> None:
    """Every step ran as asked, and every rank issued the same collectives."""
    if running.shape.pcp_gather is Gather.KV_ALL:
        assert all(plan.gather == common_pb2.GATHER_KV_ALL for plan in running.plans if plan.rows), "decode rows too"
    for plan, results in zip(running.plans, running.results, strict=True):
        assert len({result.collectives for result in results}) == 1, [result.collectives for result in results]
        if plan.rows and running.shape.always_owner:
            assert plan.decode_mode == common_pb2.DECODE_MODE_OWNER
    wanted = common_pb2.Gather.Value(f"GATHER_{running.shape.pcp_gather.name}")
    assert {plan.gather for plan in running.plans} - {common_pb2.GATHER_NONE} == {wanted}
