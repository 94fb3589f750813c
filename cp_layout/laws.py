"""The laws that a configuration must keep; checked once, at start-up, before anything is loaded.

d is the part of a DCP group that lies inside one TP group (`Grid.dcp_in_tp`); KVH the model's number of KV heads. The shape
laws (DCP = 1 or PCP·d, TP mod d = 0) are checked by `Grid` itself, the interleave laws by `Layout`.
"""

from collections.abc import Iterator

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid, divisors, shape_dcp
from cp_layout.interleave import Layout

GATHERS = ("auto", "q", "kv")
"""What prefill rows gather over the replicas; auto = chosen per step."""


def check_config(
    grid: Grid,
    layout: Layout,
    num_heads: int,
    num_kv_heads: int,
    *,
    mla: bool = False,
    q_replicate: bool = False,
    pcp_gather: str = "auto",
    mla_gather: str = "auto",
    kv_tokens_per_rank: int | None = None,
) -> None:
    """Refuse with `LayoutError` what would be wrong or unservable; the message names the numbers and the law.

    num_heads, num_kv_heads: of the whole model (num_kv_heads is ignored with `mla`: there is one latent head).
    kv_tokens_per_rank: size of a rank's KV pool in tokens, when it is configured.
    """
    check_layout(grid, layout, kv_tokens_per_rank=kv_tokens_per_rank)
    check_heads(grid, num_heads, num_kv_heads, mla=mla)
    check_q_replicate(grid, q_replicate)
    check_gather(grid, "pcp_gather", pcp_gather)
    check_gather(grid, "mla_gather", mla_gather)
    if mla_gather != "auto" and not mla:
        raise LayoutError(f"--mla-gather {mla_gather} is for latent attention, this model has {num_kv_heads} KV heads")
    if "auto" not in (pcp_gather, mla_gather) and pcp_gather != mla_gather:
        raise LayoutError(f"--pcp-gather {pcp_gather} and --mla-gather {mla_gather} contradict one another")


def check_layout(grid: Grid, layout: Layout, *, kv_tokens_per_rank: int | None = None) -> None:
    """The KV is cut over the DCP group, no more and no less, and a pool holds at least one block."""
    if layout.num_shards != grid.dcp:
        raise LayoutError(f"the layout has {layout.num_shards} KV shards, but dcp is {grid.dcp}: one shard per DCP member")
    if kv_tokens_per_rank is not None and kv_tokens_per_rank < layout.block_size:
        raise LayoutError(
            f"a KV pool of {kv_tokens_per_rank} tokens per rank holds no block of {layout.block_size} tokens: raise the pool "
            "or lower the block size"
        )


def check_heads(grid: Grid, num_heads: int, num_kv_heads: int, *, mla: bool = False) -> None:
    """TP cuts Q heads evenly, and every rank of a DCP group holds the same KV head.

    GQA: KVH divides the Q heads, TP and KVH divide one another, and d = 1 or (TP mod KVH = 0 and (TP/KVH) mod d = 0). The
    last condition is what keeps d neighbouring TP members on one KV head; d·KVH ≤ TP follows from it, but does not imply it.
    MLA: one latent head is everywhere, so TP mod d = 0 is enough.
    """
    tp, d = grid.tp, grid.dcp_in_tp
    if num_heads < 1 or (num_kv_heads < 1 and not mla):
        raise LayoutError(f"a model has at least one head of each kind, got {num_heads} Q heads and {num_kv_heads} KV heads")
    if num_heads % tp != 0:
        raise LayoutError(
            f"{num_heads} Q heads cannot be cut over tp {tp}: Q heads mod TP must be 0 "
            f"(legal tp here: {', '.join(map(str, legal_tp(num_heads, num_kv_heads, mla=mla)))})"
        )
    if mla:
        return
    if num_heads % num_kv_heads != 0:
        raise LayoutError(f"{num_heads} Q heads do not share {num_kv_heads} KV heads evenly: Q heads mod KV heads must be 0")
    if tp % num_kv_heads != 0 and num_kv_heads % tp != 0:
        raise LayoutError(
            f"tp {tp} and {num_kv_heads} KV heads must divide one another (TP mod KVH = 0 or KVH mod TP = 0; "
            f"legal tp here: {', '.join(map(str, legal_tp(num_heads, num_kv_heads)))})"
        )
    if not _one_kv_head_per_d(tp, d, num_kv_heads):
        held = f"{tp}/{num_kv_heads} = {tp // num_kv_heads}" if tp % num_kv_heads == 0 else f"{tp}/{num_kv_heads} < 1"
        raise LayoutError(
            f"dcp {grid.dcp} with tp {tp}, pcp {grid.pcp} puts d = {d} TP ranks on one KV head, but TP/KVH = {held} ranks "
            f"hold each of {num_kv_heads} KV heads: TP/KVH must be a multiple of d (legal dcp here: "
            f"{', '.join(map(str, legal_dcp(tp, grid.pcp, num_kv_heads)))})"
        )


def check_q_replicate(grid: Grid, q_replicate: bool) -> None:
    """Replicating Q projections over d TP members needs d > 1."""
    if q_replicate and grid.dcp_in_tp == 1:
        raise LayoutError(
            f"replicating Q saves nothing with d = 1: dcp {grid.dcp}, pcp {grid.pcp} leave no part of DCP inside a TP group, "
            "it needs d > 1"
        )


def check_gather(grid: Grid, name: str, gather: str) -> None:
    """Queries are gathered (`q`) to where the keys are, which needs keys that are cut over the replicas."""
    if gather not in GATHERS:
        raise LayoutError(f"{name} {gather!r} is not one of {', '.join(GATHERS)}")
    if gather == "q" and grid.pcp > 1 and grid.dcp == 1:
        raise LayoutError(
            f"{name} q with pcp {grid.pcp} needs dcp {grid.pcp} or a multiple of it, got dcp 1: every replica holds all "
            "keys, so there is nowhere to gather queries to (legal: auto, kv)"
        )


def legal_tp(num_heads: int, num_kv_heads: int, *, mla: bool = False) -> list[int]:
    """TP sizes, ascending, over which these heads can be cut."""
    return [tp for tp in divisors(num_heads) if mla or tp % num_kv_heads == 0 or num_kv_heads % tp == 0]


def legal_dcp(tp: int, pcp: int, num_kv_heads: int, *, mla: bool = False) -> list[int]:
    """DCP sizes, ascending, that the shape and KV head laws accept for this TP and PCP."""
    return [dcp for dcp in shape_dcp(tp, pcp) if mla or _one_kv_head_per_d(tp, Grid(tp, pcp, dcp).dcp_in_tp, num_kv_heads)]


def legal_shapes(
    world_size_max: int, num_heads: int, num_kv_heads: int, *, mla: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Every accepted (tp, pcp, dcp) with tp·pcp ≤ world_size_max, ascending."""
    for tp in range(1, world_size_max + 1):
        for pcp in range(1, world_size_max // tp + 1):
            for dcp in legal_dcp(tp, pcp, num_kv_heads, mla=mla):
                try:
                    check_heads(Grid(tp, pcp, dcp), num_heads, num_kv_heads, mla=mla)
                except LayoutError:
                    continue
                yield tp, pcp, dcp


def _one_kv_head_per_d(tp: int, d: int, num_kv_heads: int) -> bool:
    return d == 1 or (tp % num_kv_heads == 0 and tp // num_kv_heads % d == 0)
