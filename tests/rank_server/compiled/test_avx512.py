"""Instructions for bf16 numbers, one at a time, against torch and float64."""

import math

import numpy as np
import pytest
import torch

from rank_server.compiled import avx512
from rank_server.compiled.emitter import LANES, VECTOR, WORDS, Emitter
from rank_server.compiled.openmp import serial
from rank_server.compiled.translation import translate

pytestmark = pytest.mark.skipif(not avx512.available(), reason="this processor multiplies no bf16 numbers")


def run(instruction, result, *arguments):
    """Result of an instruction on arrays of LANES fp32 numbers or words."""
    e = Emitter("one")
    memory = np.zeros((len(arguments) + 1, LANES), dtype=np.uint32)
    at = e.function.args[0]
    values = []
    for index, each in enumerate(arguments, 1):
        memory[index] = each.view(np.uint32)
        values.append(e.load(at, WORDS if each.dtype == np.uint32 else VECTOR, index))
    e.store(instruction(e, *values), at)
    compiled = translate(e)
    serial(compiled.address, memory.ctypes.data, 1)
    return memory[0].view(result)


def pairs(seed):
    """[2 · LANES] numbers in bf16, and the same as words."""
    numbers = torch.randn(2 * LANES, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return numbers.double().numpy(), numbers.view(torch.int16).numpy().view(np.uint32)


def test_products_of_pairs_are_added():
    total = np.arange(LANES, dtype=np.float32)
    (x, x_words), (y, y_words) = pairs(1), pairs(2)
    found = run(avx512.add_products, np.float32, total, x_words, y_words)
    np.testing.assert_allclose(found, total + (x * y).reshape(LANES, 2).sum(1), rtol=1e-6)


def test_ones_add_up_the_halves_of_a_word():
    x, words = pairs(3)
    ones = np.full(LANES, avx512.ONES, dtype=np.uint32)
    found = run(avx512.add_products, np.float32, np.zeros(LANES, dtype=np.float32), words, ones)
    np.testing.assert_allclose(found, x.reshape(LANES, 2).sum(1), rtol=1e-6)


def test_words_hold_two_rounded_vectors_side_by_side():
    generator = torch.Generator().manual_seed(4)
    low, high = (torch.randn(LANES, generator=generator) for _ in range(2))
    low[:4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, math.inf, 0.0])  # ties
    found = run(avx512.words, np.uint32, low.numpy(), high.numpy())
    wanted = torch.stack((low, high), 1).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)
    assert np.array_equal(found, wanted[:, 0])
    low[5] = math.nan
    word = int(run(avx512.words, np.uint32, low.numpy(), high.numpy())[5])
    assert torch.tensor([word & 0xFFFF], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).isnan()


def test_powers_of_two():
    x = np.array([1.5] * LANES, dtype=np.float32)
    n = np.array([0, 1, -1, 3.9, -3.1, -126, -200, 200, math.nan, *range(7)], dtype=np.float32)
    found = run(avx512.times_power_of_two, np.float32, x, n)
    wanted = [1.5, 3, 0.75, 12, 1.5 / 16, 1.5 * 2.0**-126, 0, math.inf, math.nan, *(1.5 * 2.0**i for i in range(7))]
    np.testing.assert_array_equal(found, np.array(wanted, dtype=np.float32))


def test_nothing_is_left_of_any_number_times_two_to_the_minus_infinity():
    x = np.array([1.5, -1.5, 0.0, math.nan] * (LANES // 4), dtype=np.float32)
    found = run(avx512.times_power_of_two, np.float32, x, np.full(LANES, -math.inf, dtype=np.float32))
    np.testing.assert_array_equal(found, np.zeros(LANES, dtype=np.float32))
