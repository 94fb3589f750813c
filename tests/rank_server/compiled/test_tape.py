"""Recorded calls: the same programs over whatever lies in their memory when the tape runs."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rank_server.compiled import tape as tapes
from rank_server.compiled.slots import RowStore
from rank_server.compiled.tape import NotRecordable, recorder, recording
from rank_server.models.compiled_linear import CompiledGated, CompiledLinear, programs
from rank_server.models.compiled_operations import CompiledOperations
from tests.rank_server.threads import run_ranks

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
EPS = 1e-5


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_a_tape_computes_anew_from_what_lies_where_it_was_recorded():
    weight, scale = numbers(48, 32, seed=1), numbers(32, seed=2)
    matrix, gated = CompiledLinear.of(weight, None, programs(False)), CompiledGated.of(weight, weight, programs(True))

    def compute(x):
        normed = CompiledOperations().rms_norm(x, scale, EPS)
        return matrix.plus(normed, gated(normed[:, :]))

    # 40 rows are dealt out to threads, where there are any; 2 are not.
    for rows in (2, 40):
        x = numbers(rows, 32)
        with torch.inference_mode(), recording() as notes:
            out = compute(x)
        first, tape = out.clone(), notes.tape()
        assert len(tape) == 3
        for seed in (3, 4):
            x.copy_(numbers(rows, 32, seed=seed))
            tape.run()
            assert torch.equal(out, compute(x)) and not torch.equal(out, first)


def test_a_tape_keeps_what_it_writes_to():
    x, scale = numbers(1, 64), numbers(64, seed=2)
    with recording() as notes:
        for _ in range(50):
            last = CompiledOperations().rms_norm(x, scale, EPS)
    tape = notes.tape()
    # Were the first 49 results given back to the system, these would lie there.
    others = [torch.full((1, 64), 7.0, dtype=BF16) for _ in range(200)]
    tape.run()
    assert all((other == 7.0).all() for other in others)
    assert torch.equal(last, CompiledOperations().rms_norm(x, scale, EPS))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.clone(),
        lambda x: x.to(torch.float32),
        lambda x: x.t().contiguous(),
        lambda x: x.t().flatten(),
        lambda x: x.zero_(),
        lambda x: x[0, 0].item(),
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros(3),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.tensor([0.0]),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_tape_would_leave_out_is_refused(compute, inference):
    x = numbers(2, 3)  # which does more than take memory itself
    with torch.inference_mode(inference), recording() as notes:
        compute(x)
    with pytest.raises(NotRecordable, match="aten::"):
        notes.tape()


@pytest.mark.parametrize("inference", [False, True])
def test_looking_at_memory_in_another_way_is_no_computation(inference):
    x = numbers(2, 6)
    with torch.inference_mode(inference), recording() as notes:
        for each in (x.view(3, 4), x[1:], x[:, 2], x.t(), x.flatten(), x.unsqueeze(0), x.to(BF16), x.contiguous(), *x.unbind()):
            assert each.data_ptr() >= x.data_ptr()
        x.new_empty(3), torch.empty(2), torch.empty_like(x), x.split(2, 1), x.view(2, 2, 3).transpose(0, 1)
    assert len(notes.tape()) == 0


def test_a_slot_beyond_the_cache_is_found_when_the_tape_runs():
    cache = torch.zeros(2, 4, 1, 16, dtype=BF16)
    store, row, slots = RowStore([cache]), numbers(1, 1, 16), torch.tensor([3])
    with recording() as notes:
        assert store([row], slots)
    tape = notes.tape()
    slots.fill_(6)
    tape.run()
    assert torch.equal(cache[1, 2], row[0])
    slots.fill_(8)
    with pytest.raises(IndexError, match="slot 8 of a cache of 8 slots"):
        tape.run()


def test_threads_record_apart_and_one_at_a_time():
    inside, over = threading.Event(), threading.Event()

    def rank_main(rank: int):
        if rank == 0:
            with recording() as notes:
                inside.set()
                assert over.wait(10.0)
                return notes
        assert inside.wait(10.0)
        CompiledOperations().rms_norm(numbers(1, 16), numbers(16), EPS)
        torch.ones(3).sum()
        assert recorder() is None
        over.set()
        return None

    notes = run_ranks(2, rank_main)[0]
    assert notes is not None and notes.calls == [] and not notes.refusal
    with recording(), pytest.raises(AssertionError, match="already"), recording():
        pass
    assert recorder() is None


def test_followers_come_before_a_run_and_checks_behind_it_inside_of_what_surrounds_it():
    x, events = numbers(1, 16), []

    @contextmanager
    def around(calls: int):
        events.append(f"{calls} begin")
        yield
        events.append("end")

    with recording() as notes:
        CompiledOperations().rms_norm(x, x[0], EPS)
    notes.followers[0] = events.append
    notes.exchanges[around] = 3
    notes.checks.append(lambda: events.append("check"))
    notes.tape().run("given")
    assert events == ["given", "3 begin", "end", "check"]


@pytest.mark.parametrize("breath_s", [0.0, 60.0])
def test_a_tape_tells_that_it_gets_on_and_goes_on_where_it_was(monkeypatch, breath_s):
    x, scale, told = numbers(1, 64), numbers(64, seed=2), []
    with recording() as notes:
        normed = x
        for _ in range(5):
            normed = CompiledOperations().rms_norm(normed, scale, EPS)
    tape, wanted = notes.tape(), normed.clone()
    normed.zero_()
    monkeypatch.setattr(tapes, "BREATH_S", breath_s)
    tape.run(progress=lambda: told.append(normed.clone()))
    assert torch.equal(normed, wanted)
    assert len(told) == (0 if breath_s else 5)
    # Behind the last call only.
    assert [torch.equal(each, wanted) for each in told] == [False, False, False, False, True][: len(told)]


def test_recording_does_not_bring_the_compiler_of_torch():
    code = (
        "import sys, torch\n"
        "from rank_server.compiled.tape import recording\n"
        "with recording() as notes:\n"
        "    torch.empty(3).add_(1)\n"
        "assert notes.refusal == 'aten::add_', notes.refusal\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
