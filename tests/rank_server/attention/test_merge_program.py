"""The compiled merge of partials against the softmax over all keys, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_server.attention import merge_program
from rank_server.attention.merge import merge_packed, merge_partials
from rank_server.attention.merge_program import merge
from rank_server.compiled.row_call import FEW_ROWS


def exact(outs, lses):
    """The merge in float64; rows without keys are (0, −inf)."""
    outs, lses = outs.double(), lses.double()
    weights = torch.where(lses == -math.inf, 0.0, (lses - lses.amax(0).clamp(min=-1e300)).exp())
    total = weights.sum(0)
    weights = weights / torch.where(total == 0, 1.0, total)
    terms = torch.where(weights[..., None] == 0, 0.0, outs * weights[..., None])
    return terms.sum(0), lses.logsumexp(0)


def partials(number, tokens, heads, width, spread=5.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(number, tokens, heads, width, generator=generator)
    return outs, torch.randn(number, tokens, heads, generator=generator) * spread


def check(got, outs, lses):
    wanted, wanted_lse = exact(outs, lses)
    torch.testing.assert_close(got[0].double(), wanted, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), wanted_lse, rtol=2e-7, atol=1e-6)


@given(
    number=st.integers(1, 5),
    tokens=st.integers(0, 5),
    heads=st.integers(1, 9),
    chunks=st.integers(1, 5),
    spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    empty=st.lists(st.integers(0, 1000), max_size=9),
    seed=st.integers(0, 9),
)
@settings(max_examples=150)
def test_b3_any_partials_some_of_them_empty(number, tokens, heads, chunks, spread, empty, seed):
    outs, lses = partials(number, tokens, heads, 16 * chunks, spread, seed)
    for place in empty if lses.numel() else ():
        lses.view(-1)[place % lses.numel()] = -math.inf
        outs.view(-1, 16 * chunks)[place % lses.numel()] = math.nan
    check(merge(outs, lses), outs, lses)
    check(merge(list(outs), lses), outs, lses)


@pytest.mark.parametrize("shape", [(1, 9), (3, 4), (FEW_ROWS, 3), (0, 4), (5,)], ids=str)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_packed_partials_give_the_same_bits(shape, number):
    generator = torch.Generator().manual_seed(number)
    for width in (16, 64):
        packed = torch.randn(number, *shape, width + 1, generator=generator) * 3
        if packed.numel():
            packed[0, ..., -1].view(-1)[0] = -math.inf
        wanted = merge_partials(packed[..., :-1], packed[..., -1])[0]
        got = merge_program.merge_packed(packed)
        assert got is not None and torch.equal(got, wanted)
        assert torch.equal(merge_packed(packed), wanted)


def test_packed_partials_that_the_program_leaves_to_torch():
    for packed in (torch.randn(2, 3, 16), torch.randn(2, 3, 17).double(), torch.randn(2, 17, 3).transpose(1, 2)):
        assert merge_program.merge_packed(packed) is None
        wanted = merge_partials(packed[..., :-1], packed[..., -1])[0]
        torch.testing.assert_close(merge_packed(packed), wanted, rtol=1e-6, atol=2e-6)


def test_what_arrives_side_by_side():
    """As all-to-all brings it, [N, T, h, D + 1]; and rows at distances that differ are for torch."""
    outs, lses = partials(2, 3, 4, 32)
    received = torch.cat((outs, lses[..., None]), -1)
    check(merge(received[..., :-1], received[..., -1]), outs, lses)
    turned = outs.transpose(1, 2).contiguous().transpose(1, 2)
    assert merge(turned, lses) is None
    check(merge_partials(turned, lses), outs, lses)


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        partials(2, 3, 4, 24),
        (partials(2, 3, 4, 32)[0].double(), partials(2, 3, 4, 32)[1]),
        (partials(2, 3, 4, 32)[0], partials(2, 3, 4, 32)[1].double()),
        (partials(2, 3, 4, 64)[0][..., ::2], partials(2, 3, 4, 32)[1]),
        (partials(2, 3, 4, 32)[0], partials(3, 3, 4, 32)[1]),
        (partials(2, 3, 4, 32)[0], partials(2, 3, 5, 32)[1]),
        ([partials(1, 3, 4, 32)[0][0], partials(1, 2, 4, 32)[0][0]], partials(2, 3, 4, 32)[1]),
    ],
    ids=["24 wide", "wider out", "wider lse", "spread", "more lses", "other heads", "fewer rows"],
)
def test_what_it_cannot_merge_is_left_to_torch(outs, lses):
    assert merge(outs, lses) is None


def test_many_rows_on_any_number_of_threads(threads):
    outs, lses = partials(3, FEW_ROWS, 3, 16)
    got = merge(outs, lses)
    check(got, outs, lses)
    for token in range(FEW_ROWS):
        alone = merge(outs[:, token : token + 1], lses[:, token : token + 1])
        assert all(torch.equal(mine[0], all_[token]) for mine, all_ in zip(alone, got, strict=True))


def test_b4_nan_is_seen_and_empty_sets_count_for_nothing_whatever_they_hold():
    outs, lses = partials(2, 1, 3, 16)
    lses[0, 0, 0] = math.nan
    lses[1, 0, 1], outs[1, 0, 1] = lses[0, 0, 1] - 120, math.inf
    outs[1, 0, 2, 5] = math.nan
    out, lse = merge(outs, lses)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan()
    assert torch.equal(out[0, 1], outs[0, 0, 1])
    assert lse[0, 1] == lses[0, 0, 1]
    assert out[0, 2].isnan().nonzero().flatten().tolist() == [5]


def test_scores_beyond_the_range_of_exp():
    lses = torch.tensor([1e4, 1e4 - 1, -1e4])[:, None, None]
    outs = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None].expand(-1, 1, 1, 16).contiguous()
    check(merge(outs, lses), outs, lses)
