"""SmolLM2 on real clusters of every shape that is promised for it: ids and log-probabilities of `transformers` in fp32."""

import pytest

from tests import smollm2_reference
from tests.cluster.processes import kvloom_up

pytestmark = [pytest.mark.cluster, pytest.mark.sweep]

SHAPES = [
    ((1, 1, 1), 16),
    ((3, 1, 1), 16),
    ((1, 2, 1), 16),
    *(((1, n, n), interleave) for n in (2, 4) for interleave in (1, 4, 16)),
    ((1, 3, 3), 16),
    ((3, 2, 2), 16),
]


@pytest.mark.parametrize(("shape", "interleave"), SHAPES, ids=lambda value: str(value).replace(" ", ""))
def test_ids_and_logprobs(tmp_path, shape, interleave):
    tp, pcp, dcp = shape
    flags = ["-tp", str(tp), "-pcp", str(pcp), "-dcp", str(dcp), "--cp-kv-cache-interleave-size", str(interleave)]
    with kvloom_up(*flags, "--dtype", "float32", "--kv-cache-tokens-per-rank", "2048", log=tmp_path / "stderr") as running:
        smollm2_reference.assert_answers(running.client)
