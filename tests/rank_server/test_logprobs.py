"""Scores of positions against the plain definition; slices that depend on the model alone."""

import math

import pytest
import torch

from rank_server.logprobs import SLICE_BYTES, likeliest, rows_per_slice, score


def test_scores_equal_the_plain_definition():
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(4, 200, generator=generator)
    expected = torch.log_softmax(logits.double(), 1)
    tokens, tops = [0, 199, 7, 7], [0, 1, 3, 20]
    for row, (got, token, top) in enumerate(zip(score(logits, tokens, tops), tokens, tops, strict=True)):
        assert got.of_token == pytest.approx(float(expected[row, token]), abs=1e-12)
        best = likeliest(logits[row], top).tolist() if top else []
        assert [i for i, _ in got.top] == best
        assert [p for _, p in got.top] == pytest.approx([float(expected[row, i]) for i in best], abs=1e-12)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_score_and_spoil_no_other(broken):
    logits = torch.zeros(3, 10)
    logits[1, 4] = broken
    first, second, third = score(logits, [1, 1, 1], [2, 2, 2])
    assert second is None
    assert first == third
    assert first.of_token == pytest.approx(-math.log(10))


@pytest.mark.parametrize(("vocab", "rows"), [(49152, 170), (152064, 55), (1 << 30, 1)])
def test_slices_are_bounded_in_bytes(vocab, rows):
    assert rows_per_slice(vocab) == rows
    assert rows == 1 or rows * vocab * 4 <= SLICE_BYTES
