"""Which source rank's blocks a target rank reads with I = B, as established implementations of the transfer computed it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Reshard, Side, reshard

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "layout_vectors.json").read_text())
BLOCK = 16


def named(case: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in case.items() if key not in ("reads", "plan", "errors"))


def side(tp: int, pcp: int, dcp: int, block: int) -> Side:
    return Side(Grid(tp, pcp, dcp), Layout(dcp, block, block), 1)


def sources_of(plan: Reshard, rank: int) -> dict[int, Any]:
    return {link.src: plan.runs_of(link) for link in plan.links if link.dst == rank}


@pytest.mark.parametrize("case", VECTORS["nixl_pull"], ids=named)
def test_nixl_pull_without_its_padding_blocks(case: dict[str, Any]) -> None:
    source, target = (side(case[end]["tp"], 1, case[end]["dcp"], BLOCK) for end in "PD")
    n = source.layout.num_shards
    end = case["prompt_blocks"] * BLOCK
    start = min(case["cached_local_blocks"] * target.layout.virtual_block_size, end)
    plan = reshard(source, target, start, end)
    for rank in range(target.grid.world_size):
        wanted = {
            src: [block for block in blocks if block < case["prompt_blocks"]]
            for src, blocks in case["reads"][str(rank)]
            if src != "reads padding blocks"
        }
        read = {src: (runs.src_column * n + source.shard_of(src)).tolist() for src, runs in sources_of(plan, rank).items()}
        assert read == {src: blocks for src, blocks in wanted.items() if blocks}


@pytest.mark.parametrize("case", VECTORS["ascend_mooncake_pull"], ids=named)
def test_ascend_mooncake_pull(case: dict[str, Any]) -> None:
    source = side(*case["P_tp_pcp_dcp"], case["P_block"])
    target = side(*case["D_tp_pcp_dcp"], case["D_block"])
    plan = reshard(source, target, case["cached_tokens"], case["prompt_blocks"] * case["P_block"])
    # Its unit is the smaller of the two block sizes.
    unit = min(case["P_block"], case["D_block"])
    for place, reads in case["plan"].items():
        pcp, tp = json.loads(place.replace("(", "[").replace(")", "]"))
        found = sources_of(plan, target.grid.rank(0, pcp, tp))
        assert sorted(found) == [src for src, _, _ in reads]
        for src, there, here in reads:
            runs, (p, d) = found[src], (case["P_block"] // unit, case["D_block"] // unit)
            units = runs.count // unit
            assert (runs.count % unit == 0).all()
            assert expand(runs.src_column * p + runs.src_offset // unit, units) == there
            assert expand(runs.dst_column * d + runs.dst_offset // unit, units) == here


def expand(first: np.ndarray, count: np.ndarray) -> list[int]:
    return [int(start) + k for start, size in zip(first, count, strict=True) for k in range(size)]
