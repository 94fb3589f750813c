"""Numbers that established implementations computed for the same laws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_layout.interleave import Layout

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "layout_vectors.json").read_text())


@pytest.mark.parametrize("case", VECTORS["local_seq_lens"], ids=lambda c: f"L{c['L']}-N{c['N']}-I{c['I']}")
def test_local_seq_lens(case: dict[str, Any]) -> None:
    layout = Layout(case["N"], case["I"], case["I"])
    assert layout.local_lens(case["L"]) == case["out"]
    at = [int(layout.local_lens_at(shard, np.array([case["L"]]))[0]) for shard in range(case["N"])]
    assert at == case["out"]


@pytest.mark.parametrize("case", VECTORS["slot_mapping"], ids=lambda c: f"B{c['B']}-N{c['N']}-I{c['I']}")
def test_slot_mapping(case: dict[str, Any]) -> None:
    layout = Layout(case["N"], case["I"], case["B"])
    positions = np.array(case["positions"])
    padding = np.full(case["pad_to"] - len(positions), -1)
    for shard in range(case["N"]):
        starts = case["query_start_loc"]
        rows = [
            layout.slots(shard, np.array(table), positions[start:end])
            for table, start, end in zip(case["block_table"], starts, starts[1:], strict=False)
        ]
        padded = layout.slots(shard, np.array(case["block_table"][0]), padding)
        assert np.concatenate([*rows, padded]).tolist() == case["slots"][shard]
