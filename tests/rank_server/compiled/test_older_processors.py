"""Programs in bf16 on x86 processors without instructions for bf16: a process of its own takes this one for such a one."""

import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
X86 = llvm.get_process_triple().startswith("x86_64")
FEATURES = llvm.get_host_cpu_features() if X86 else {}
PROGRAM = """
import sys
import llvmlite.binding as llvm
from tests.rank_server.compiled import test_older_processors as here

class Nothing(dict):
    def flatten(self):
        return ""

llvm.get_host_cpu_name, llvm.get_host_cpu_features = lambda: sys.argv[1], Nothing
here.every_program()
"""


def every_program() -> None:
    """Runs each of them once, against torch in fp32."""
    from rank_server.attention.cpu import CpuKernels
    from rank_server.compiled import avx512, sums
    from rank_server.models.compiled_operations import CompiledOperations
    from rank_server.models.linear import gated, linear
    from tests.rank_server.attention.dense import dense_attention
    from tests.rank_server.attention.test_partial import SCALE, make
    from tests.rank_server.collectives.harness import Implementation
    from tests.rank_server.threads import run_ranks

    assert not avx512.available()
    x, w, v = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(BF16) for rows in (3, 40, 41))
    v, bias, operations = v[:40], w[:, 0].clone(), CompiledOperations()
    xs, ws, vs = x.float(), w.float(), v.float()

    def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got.float(), wanted, rtol=2**-8, atol=1e-4)

    near(operations.rms_norm(x, w[0], 1e-5), torch.nn.functional.rms_norm(xs, (64,), ws[0], 1e-5))
    near(linear(w, bias)(x), xs @ ws.T + bias.float())
    near(gated(w, v)(x), torch.nn.functional.silu(xs @ ws.T) * (xs @ vs.T))
    cos, sin = w[:3, None], v[:3, None]
    q, key, _ = operations.turn(torch.stack((x, x, x), 1), 1, cos, sin, None, 1e-5)
    turned = xs * cos[:, 0].float() + xs.roll(32, 1) * sin[:, 0].float()
    near(torch.stack((q, key)), torch.stack((turned, turned))[:, :, None])
    total = sums.total(torch.stack((x, x)))
    assert total is not None
    near(total, 2 * xs)
    groups = Implementation("shm", 2).open()
    for sent in (x[0, :57], xs[0, :57]):
        for received in run_ranks(2, lambda member: groups[member].all_reduce(sent)):  # noqa: B023
            near(received, 2 * xs[0, :57])
    case = make(([70], list(range(18))), ([3, 4, 5, 6, 7, 8], [20, 21]), head_dim=16, dtype=BF16)
    out, lse = CpuKernels().paged(case.q, *case.pool.cache(0), case.batch, SCALE)
    for row, (k, v) in zip(case.batch.rows, case.keys, strict=True):
        tokens = slice(row.q_start, row.q_start + row.q_len)
        found = out[tokens].double(), lse[tokens].double()
        wanted = dense_attention(case.q[tokens], k, v, case.batch.visible[tokens], SCALE)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not X86, reason="the other processors are x86 ones")
@pytest.mark.parametrize("name", ["x86-64", "haswell"])
def test_programs_call_nothing_that_a_process_lacks(name):
    if name == "haswell" and not FEATURES.get("avx2"):
        pytest.skip("this processor has less than the other one")
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
