"""bf16 ↔ fp32 in compiled programs, number by number, against torch."""

import numpy as np
import pytest
import torch

from rank_server.compiled import emitter
from rank_server.compiled.bfloat import store_rounded, widened
from rank_server.compiled.emitter import LANES, VECTOR, Emitter
from rank_server.compiled.openmp import serial
from rank_server.compiled.translation import translate


def converted(numbers: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """The numbers, as many as there are lanes or multiples of that, in the other dtype."""
    e = Emitter("convert")
    source, target = (e.load(e.function.args[0], e.integer(0).type, index) for index in (0, 1))
    with e.loop(0, len(numbers) // LANES) as chunk:
        if to == torch.float32:
            e.store(widened(e, source, chunk), target, chunk)
        else:
            store_rounded(e, e.load(source, VECTOR, chunk), target, chunk)
    compiled, out = translate(e), torch.empty(len(numbers), dtype=to)
    addresses = np.array([numbers.data_ptr(), out.data_ptr()])
    serial(compiled.address, addresses.ctypes.data, 1)
    return out


EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_every_number_is_widened():
    assert torch.equal(converted(EVERY_BF16, torch.float32).view(torch.int32), EVERY_BF16.float().view(torch.int32))


@pytest.mark.parametrize("instruction", [emitter.rounds_to_bf16(), False])
@pytest.mark.parametrize("behind", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_number_and_what_lies_behind_it_is_rounded_to_the_nearest(behind, instruction, monkeypatch):
    """Ties, neighbours of ties, carries into the exponent and to infinity, both signs. Processors may take subnormals for 0."""
    monkeypatch.setattr(emitter, "rounds_to_bf16", lambda: instruction)
    wide = (EVERY_BF16.float().view(torch.int32) + behind).view(torch.float32)
    got, wanted = converted(wide, torch.bfloat16), wide.to(torch.bfloat16)
    assert torch.equal(got.isnan(), wide.isnan())
    normal = wide.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(got[normal].view(torch.int16), wanted[normal].view(torch.int16))
    subnormal = ~normal & ~wide.isnan()
    assert torch.logical_or(got == wanted, got == 0)[subnormal].all()
