"""Operations of the emitter one by one, run on this processor."""

import ctypes

import numpy as np
import pytest
import torch

from rank_server.compiled.emitter import HALVES, I64, LANES, VECTOR, WORDS, Emitter
from rank_server.compiled.exponential import exponential
from rank_server.compiled.openmp import parallel
from rank_server.compiled.translation import translate

RECORD = np.dtype([("source", np.int64), ("result", np.int64), ("count", np.int64)])


def run(build, source: torch.Tensor, result: torch.Tensor, count: int = 0) -> torch.Tensor:
    """`result` after the program that build(emitter, fields) writes has run."""
    e = Emitter("program")
    build(e, e.fields(RECORD))
    record = np.zeros((), RECORD)
    record["source"], record["result"], record["count"] = source.data_ptr(), result.data_ptr(), count
    compiled = translate(e)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(record.ctypes.data)
    return result


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16])
@pytest.mark.parametrize(("kind", "dtype"), [(VECTOR, torch.float32), (WORDS, torch.int32), (HALVES, torch.int16)])
def test_the_first_elements_alone_are_read_and_written(kind, dtype, count):
    source, result = torch.arange(1, 1 + LANES).to(dtype), torch.full((2, LANES), -1, dtype=dtype)

    def build(e, call):
        loaded = e.load_first(call["count"], call["source"], kind)
        e.store(loaded, call["result"])
        e.store_first(call["count"], loaded, call["result"], 1)

    run(build, source, result, count)
    expected = source.clone()
    expected[count:] = 0
    assert torch.equal(result[0], expected)
    expected[count:] = -1
    assert torch.equal(result[1], expected)


def test_bfloat16_is_rounded_as_torch_does():
    source = torch.randn(LANES, generator=torch.Generator().manual_seed(0))
    source[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, torch.nan, 3.4e38])
    result = run(
        lambda e, call: e.store(e.rounded(e.load(call["source"])), call["result"]), source, torch.zeros(LANES).bfloat16()
    )
    torch.testing.assert_close(result, source.bfloat16(), rtol=0, atol=0, equal_nan=True)
    wide = run(lambda e, call: e.store(e.widened(e.load(call["source"], HALVES)), call["result"]), result, torch.zeros(LANES))
    torch.testing.assert_close(wide, result.float(), rtol=0, atol=0, equal_nan=True)


def test_lanes_are_added_up_each_vector_for_itself():
    source = torch.randn(LANES, LANES, generator=torch.Generator().manual_seed(0))

    def build(e, call):
        e.store(e.across_each([e.load(call["source"], VECTOR, i) for i in range(LANES)]), call["result"])

    torch.testing.assert_close(run(build, source, torch.zeros(LANES)), source.sum(1), rtol=1e-5, atol=1e-5)


def test_the_exponential_function():
    source = -torch.tensor([0, 1e-3, 0.3, 0.5, 1, 2, 5, 10, 20, 50, 80, 87, 90, 1e30, torch.inf, torch.nan])
    result = run(lambda e, call: e.store(exponential(e, e.load(call["source"])), call["result"]), source, torch.zeros(LANES))
    torch.testing.assert_close(result[:12].double(), source[:12].double().exp(), rtol=2e-7, atol=0)
    assert (result[12:15] < 2e-38).all()
    assert result[15].isnan()


def test_a_counted_loop():
    def build(e, call):
        total = e.variable(e.integer(0))
        with e.loop(0, call["count"], 3) as i:
            e.set(total, e.at(e.get(total), e.load(call["source"], I64, i)))
        e.store(e.get(total), call["result"])

    assert run(build, torch.arange(10), torch.zeros(1, dtype=torch.int64), 10).item() == 0 + 3 + 6 + 9


def test_a_shared_loop_takes_each_number_once():
    """On several threads at once; `source` has the counter, `result` counts the visits."""

    def build(e, call):
        with e.shared_loop(call["source"], call["count"]) as number:
            e.store(e.at(e.load(call["result"], I64, number), 1), call["result"], number)

    e = Emitter("program")
    build(e, e.fields(RECORD))
    compiled, count = translate(e), 1000
    counter, visits = torch.zeros(1, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.int64)
    record = np.zeros((), RECORD)
    record["source"], record["result"], record["count"] = counter.data_ptr(), visits.data_ptr(), count
    run_together = parallel()
    assert run_together is not None
    run_together(compiled.address, record.ctypes.data, 4)
    assert visits.tolist() == [1] * count + [0]
