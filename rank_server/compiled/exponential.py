"""The exponential function in the programs of `Emitter`."""

from llvmlite import ir

from rank_server.compiled.emitter import I32, LANES, VECTOR, WORDS, Emitter


def exponential(e: Emitter, x: ir.Value) -> ir.Value:
    """exp(x) of x ≤ 0 to 1 ulp, but at least 2^-126; NaN of NaN.

    x = n·ln 2 + r with |r| ≤ ln 2 / 2; ln 2 stands in two parts, the first of which n multiplies exactly; e^r is the
    polynomial of the Cephes library.
    """
    lowest, kind = e.number(-87.0, x.type), x.type
    x = e.b.select(e.b.fcmp_ordered("<", x, lowest), lowest, x)
    n = e.intrinsic("roundeven", e.b.fmul(x, e.number(1.4426950408889634, kind)))
    r = e.sum_of_products(n, e.number(-0.693359375, kind), x)
    r = e.sum_of_products(n, e.number(2.12194440e-4, kind), r)
    p = e.number(1.9875691500e-4, kind)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = e.sum_of_products(p, r, e.number(c, kind))
    p = e.b.fadd(e.sum_of_products(e.b.fmul(p, r), r, r), e.number(1.0, kind))
    # NaN has no integer: it is kept by p, and n is replaced.
    n = e.b.select(e.b.fcmp_ordered(">", n, e.number(-126.0, kind)), n, e.number(-126.0, kind))
    words = WORDS if kind == VECTOR else I32
    bits = (ir.Constant(words, [c] * LANES if kind == VECTOR else c) for c in (127, 23))
    power = e.b.shl(e.b.add(e.b.fptosi(n, words), next(bits)), next(bits))
    return e.b.fmul(p, e.b.bitcast(power, kind))


def sigmoid(e: Emitter, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(−x)) of a vector; NaN of NaN."""
    one = e.number(1.0, VECTOR)
    power = exponential(e, e.b.fneg(e.intrinsic("fabs", x)))
    return e.b.fdiv(e.b.select(e.b.fcmp_ordered("<", x, e.number(0.0, VECTOR)), power, one), e.b.fadd(one, power))
