"""Bytes that are filled where they lie are like any others."""

import gc

import numpy as np
import pytest

from kv_transfer.fresh_bytes import filled


@pytest.mark.parametrize("size", [0, 1, 2, 33, 5000, 1 << 20])
def test_what_was_written_is_what_it_holds(size: int) -> None:
    wanted = np.random.default_rng(size).integers(0, 256, size, np.uint8)

    def fill(out: np.ndarray) -> None:
        assert out.shape == (size,) and out.flags.writeable
        out[:] = wanted

    made = [filled(size, fill) for _ in range(3)]
    gc.collect()
    assert made == [wanted.tobytes()] * 3
    assert hash(made[0]) == hash(wanted.tobytes()) and made[0] + b"x" == wanted.tobytes() + b"x"


def test_bytes_that_python_shares_are_not_written_to() -> None:
    """There is one object for b'' and one for each single byte."""
    a, z = filled(1, lambda out: out.fill(97)), filled(1, lambda out: out.fill(122))
    assert (a, z, bytes([97]), b"abc"[:1]) == (b"a", b"z", b"a", b"a")


def test_a_failure_to_fill_is_raised() -> None:
    def fail(out: np.ndarray) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        filled(100, fail)
