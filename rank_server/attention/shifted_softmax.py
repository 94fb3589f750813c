"""Softmax-weighted sums of many queries in bf16, without scores in memory and without a running maximum.

On a CPU with bf16 instructions oneDNN multiplies bf16 matrices into fp32 sums and can apply a bias and a sigmoid to the sums
before it rounds them. For x < 0, sigmoid(x) = exp(x) / (1 + exp(x)) is exp(x) but for a relative error below exp(x). So with a
shift c well above the scores s of a row, one product gives the row's softmax weights exp(s − c): scores and exponentials are
fp32, only weights are rounded to bf16, whose exponent range is that of fp32. Any c in a wide window gives the same quotient
Σ exp(s − c)·v / Σ exp(s − c), so it needs no update while keys come in. It is estimated from a few keys, plus a margin; whether
every row stayed inside the window is known from its sum at the end, and a tile that did not is computed in another way.
"""

import math
from functools import cache

import torch
from torch import Tensor

MARGIN = 52.0
"""Shift above the estimate. A row's log-sum may lie 12 below the estimate (which hidden keys may have raised) to 44 above."""
HIGHEST_SUM = math.exp(-8.0)
"""Bounds every weight of a row, hence the relative error of sigmoid in place of exp: 2^-11, a quarter of a bf16 ulp."""
LOWEST_SUM = math.exp(-64.0)
"""Weights below 1e-38 become 0: at this sum they are 1e-10 of it, a key."""


def suits(q: Tensor, stored: torch.dtype) -> bool:
    """Whether queries like q can be attended over keys of the dtype `stored` this way."""
    return q.device.type == "cpu" and q.dtype == stored == torch.bfloat16 and _fuses_sigmoid()


@cache
def _fuses_sigmoid() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class ShiftedSoftmax:
    """Sums of a tile of queries q [t, h, D] bf16 over keys that come in pieces; sample: [n, hk, D] some of them, n ≥ 1."""

    def __init__(self, q: Tensor, sample: Tensor, scale: float) -> None:
        self._tokens, heads, head_dim = q.shape
        self._kv_heads = sample.shape[1]
        self._share = heads // self._kv_heads
        rows = self._tokens * self._share
        packed = q.reshape(self._tokens, self._kv_heads, self._share, head_dim).transpose(0, 1)
        self._twice = math.frexp(scale)[0] != 0.5
        """A scale that is no power of two would cost the queries a rounding: they are kept as a sum of two bf16 numbers."""
        if self._twice:
            exact = packed.reshape(self._kv_heads, rows, head_dim).to(torch.float32).mul_(scale)
            high = exact.to(torch.bfloat16)
            self._q = torch.cat((high, exact.sub_(high).to(torch.bfloat16)), -1)
        else:
            self._q = packed.mul(scale).reshape(self._kv_heads, rows, head_dim)
        estimate = torch.stack([(k @ q.T).amax(0) for k, q in zip(self._keys(sample), self._q, strict=True)])
        self._bias = -(estimate.to(torch.float32) + MARGIN).to(torch.bfloat16)
        self._sum = torch.zeros((self._kv_heads, rows), dtype=torch.float32, device=self._q.device)
        self._out = torch.zeros((self._kv_heads, rows, head_dim), dtype=torch.float32, device=self._q.device)

    def _keys(self, k: Tensor) -> list[Tensor]:
        """[n, hk, D] → per KV head [n, D], contiguous, twice side by side where the queries are a sum of two."""
        return [torch.cat((each, each), -1) if self._twice else each.contiguous() for each in k.unbind(1)]

    def add(self, k: Tensor, v: Tensor, seen: Tensor | None = None) -> None:
        """Takes in k, v [n, hk, D] bf16; query i sees the first seen[i] of them (any integer), None: all."""
        hidden = None
        if seen is not None:
            # 32-bit numbers are compared several times faster than 64-bit ones.
            numbers = torch.arange(len(k), dtype=torch.int32, device=k.device).unsqueeze(1)
            hidden = numbers >= seen.to(torch.int32).repeat_interleave(self._share)
        for head, (keys, values) in enumerate(zip(self._keys(k), v.unbind(1), strict=True)):
            weights = torch.ops.mkldnn._linear_pointwise(keys, self._q[head], self._bias[head], "sigmoid", [], "")
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            self._sum[head] += weights.sum(0, dtype=torch.float32)
            self._out[head] += weights.T @ values.contiguous()

    def result(self, empty: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """(out [t, h, D], lse [t, h], fp32), or None when some row left the window (or met a NaN): nothing is known then.

        empty: [t] queries that see no key and get (0, −inf); None: there are none.
        """
        inside = (self._sum >= LOWEST_SUM) & (self._sum <= HIGHEST_SUM)
        if empty is not None:
            inside |= empty.repeat_interleave(self._share)
        if not inside.all():
            return None
        lse = self._sum.log() - self._bias
        out = self._out / torch.where(self._sum == 0, 1.0, self._sum).unsqueeze(-1)
        shape = (self._kv_heads, self._tokens, self._share)
        heads = self._kv_heads * self._share
        return (
            out.view(*shape, -1).transpose(0, 1).reshape(self._tokens, heads, -1),
            lse.view(shape).transpose(0, 1).reshape(self._tokens, heads),
        )
