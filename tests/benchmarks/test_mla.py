"""What the benchmark of latent attention computes from its measurements."""

import pytest

from benchmarks.mla import DC, DR, DV, HEADS, predicted_crossover, reorganisation, write_model
from model_files import open_model


def test_the_prediction_is_that_of_the_bytes() -> None:
    assert predicted_crossover(10) == pytest.approx(10 * HEADS * ((DC + DR) * 2 + DV * 4 + 4) / ((DC + DR) * 2))


def test_a_copy_is_measured_against_a_clone() -> None:
    row = reorganisation(100, 2, 4, 3)
    assert row["ratio"] == pytest.approx(row["ms"]["reorg"]["median"] / row["ms"]["clone"]["median"], rel=0.1)


def test_the_model_is_one_that_a_rank_opens(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = open_model(write_model(tmp_path)).shape
    assert (shape.kv_bytes_per_token(1, "bfloat16"), shape.moe) == (4 * (DC + DR) * 2, None)
