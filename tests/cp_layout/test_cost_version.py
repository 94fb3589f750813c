"""Whoever changes what the cost model predicts raises its version."""

import hashlib
from dataclasses import replace
from itertools import product

from cp_layout import cost, rates, sums
from cp_layout.cost import COST_VERSION, CostModel, Rates, StepFacts
from cp_layout.grid import Grid
from cp_layout.model_shape import DTYPE_BYTES, MlaShape, ModelShape

VERSION, DIGEST = 7, "ee22ba50fa46bcf7"
"""Of the cost model as it is: its constants, and the work that it counts."""

GQA = ModelShape("llama", 2, 64, 8, 2, 16, 96, 100, 8192, 1e-5, 1e5, True, "bfloat16")
SHAPES = {"grouped": GQA, "latent": replace(GQA, num_kv_heads=1, mla=MlaShape(None, 48, 16, 16, 16))}
GRIDS = ((1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 4))
FACTS = (
    StepFacts(decode_rows=3, decode_context=500),
    StepFacts(prefill_rows=2, prefill_tokens=7, prefill_context=90, prefill_pairs=400),
    StepFacts(5, 4000, 1, 600, 900_000, 600 * 900_000 + 600 * 601 // 2),
)


def numbers() -> dict[str, object]:
    """Constants, and work by model, way and facts, to nine digits: the order of a sum changes nothing."""
    found: dict[str, object] = {
        "rates": tuple(Rates()),
        "dtypes": DTYPE_BYTES,
        "constants": (cost.PARTIAL_BYTES, cost.WORKSPACE_BYTES, sums.SCATTERED_SUM_BYTES, rates.LEAST_S, rates.MAX_SURPRISE),
        "weight of a step": rates.refined.__defaults__,
    }
    for name, grid, merge_rounds in product(SHAPES, GRIDS, (1, 2)):
        model = CostModel.of(SHAPES[name], Grid(*grid), 1e6, "bfloat16", "float32", merge_rounds)
        ways = [model.replicated, model.split, model.owner_kv]
        ways += [model.owner_q, model.owner_kv_all] if grid[2] > 1 else []
        for way, (number, facts) in product(ways, enumerate(FACTS)):
            found[f"{name} {grid} {merge_rounds} {way.__name__} {number}"] = [f"{amount:.9g}" for amount in way(facts)]
    return found


def test_another_prediction_is_another_version() -> None:
    digest = hashlib.sha256(repr(numbers()).encode()).hexdigest()[:16]
    assert (COST_VERSION, digest) == (VERSION, DIGEST), (
        "the cost model's constants or formulas have changed: raise COST_VERSION if that has not been done yet, and put it and "
        f"{digest!r} here, as VERSION and DIGEST"
    )
