import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rank_server.attention.merge import OnlineMerge, clear_empty, merge_partials, scaled, shares

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "layout_vectors.json").read_text())["lse_combine"]
INF = math.inf


def one(out: float, lse: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([[[out]]]), torch.tensor([[lse]])


def merge(*partials: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return merge_partials(torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]))


def pieces(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(3, 2, 4, generator=generator), 5 * torch.randn(3, 2, generator=generator)) for _ in range(count)]


EMPTY = (torch.zeros(3, 2, 4), torch.full((3, 2), -INF))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"base {case['base']}")
def test_golden_vectors(case: dict[str, list[object] | str]) -> None:
    outs = torch.tensor(to_floats(case["outputs"]))
    to_natural = math.log(2) if case["base"] == "2" else 1.0
    out, lse = merge_partials(outs, torch.tensor(to_floats(case["lses"])) * to_natural)
    torch.testing.assert_close(out, torch.tensor(to_floats(case["combined"])), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse, torch.tensor(to_floats(case["global_lse"])) * to_natural, rtol=1e-5, atol=1e-5)
    weights, _ = shares(torch.tensor(to_floats(case["lses"])) * to_natural)
    for shard, wanted in enumerate(torch.tensor(to_floats(case["per_rank_scaled"]))):
        torch.testing.assert_close(scaled(outs[shard], weights[shard]), wanted, rtol=2e-5, atol=2e-6)


def to_floats(value: object) -> object:
    return [to_floats(each) for each in value] if isinstance(value, list) else float(str(value))


def test_b1_a_shard_without_keys_changes_nothing() -> None:
    for full in pieces(2):
        for order in itertools.permutations([full, EMPTY, EMPTY]):
            out, lse = merge(*order)
            assert torch.equal(lse, full[1])
            assert torch.equal(out, full[0])


def test_b3_all_empty_is_empty_for_any_number_of_shards() -> None:
    for count in (1, 2, 3, 8):
        out, lse = merge(*[EMPTY] * count)
        assert torch.equal(out, EMPTY[0])
        assert torch.equal(lse, EMPTY[1])


def test_b3_order_grouping_and_empties_do_not_matter() -> None:
    a, b, c = pieces(3)
    wanted = merge(a, b, c)
    orders = list(itertools.permutations([a, b, c]))
    for x, y, z in orders:
        for result in (merge(merge(x, y), z), merge(x, merge(EMPTY, merge(y, z))), merge(EMPTY, x, EMPTY, y, z, EMPTY)):
            torch.testing.assert_close(result[0], wanted[0], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(result[1], wanted[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("garbage", [INF, -INF, math.nan, 0.0, 7.0])
def test_b4_what_a_kernel_left_for_a_row_without_keys_is_replaced(garbage: float) -> None:
    out, lse = torch.full((2, 1, 3), garbage), torch.full((2, 1), garbage)
    clear_empty(out, lse, torch.tensor([0, 4]))
    assert out[0].tolist() == [[0.0, 0.0, 0.0]]
    assert lse[0].tolist() == [-INF]
    torch.testing.assert_close(out[1], torch.full((1, 3), garbage), rtol=0, atol=0, equal_nan=True)


def test_b5_lse_is_the_natural_logarithm() -> None:
    out, lse = merge(one(0.0, math.log(2)), one(1.0, math.log(8)))
    assert float(out) == pytest.approx(0.8, abs=1e-6)
    assert float(lse) == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
def test_b6_garbage_with_weight_zero_does_not_survive(garbage: float) -> None:
    out, lse = merge(one(garbage, -INF), one(3.0, 1.0), one(garbage, -INF))
    assert (float(out), float(lse)) == (3.0, 1.0)
    assert float(scaled(one(garbage, -INF)[0], torch.tensor([[0.0]]))) == 0.0


@pytest.mark.parametrize("magnitude", [8.0e4, -8.0e4, 3.0e38])
def test_b10_large_scores_neither_overflow_nor_vanish(magnitude: float) -> None:
    out, lse = merge(one(65504.0, magnitude), one(65504.0, magnitude))
    assert float(out) == 65504.0
    assert float(lse) == pytest.approx(magnitude + math.log(2), rel=1e-6)
    out, lse = merge(one(1.0, magnitude), one(2.0, -magnitude))
    assert float(out) == (1.0 if magnitude > 0 else 2.0)
    assert float(lse) == pytest.approx(abs(magnitude), rel=1e-6)


def test_reduction_form_equals_receiver_form() -> None:
    parts = pieces(4)
    weights, _ = shares(torch.stack([lse for _, lse in parts]))
    summed = sum((scaled(out, weight) for (out, _), weight in zip(parts, weights, strict=True)), torch.zeros(3, 2, 4))
    assert torch.equal(summed, merge(*parts)[0])


def test_inputs_are_not_modified() -> None:
    parts = pieces(2)
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    before = outs.clone(), lses.clone()
    merge_partials(outs, lses)[0].fill_(0)
    merge_partials(outs[:1], lses[:1])[0].fill_(0)
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])


def test_b6_an_online_merge_of_one_partial_keeps_no_garbage() -> None:
    merged = OnlineMerge((2, 1, 3))
    merged.add(torch.tensor([[[math.nan] * 3], [[1.0, 2.0, 3.0]]]), torch.tensor([[-INF], [0.5]]))
    out, lse = merged.result()
    assert out.tolist() == [[[0.0, 0.0, 0.0]], [[1.0, 2.0, 3.0]]]
    assert lse.tolist() == [[-INF], [0.5]]
