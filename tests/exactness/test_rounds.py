"""The collectives that are predicted of a step are those that its ranks count, whichever way it goes."""

import pytest

from coordinator.choice import Choice, work_of
from coordinator.plan import DecodeMode, Gather
from coordinator.set_maker import cost_model
from cp_wire.pb import common_pb2, rank_pb2
from model_files import open_model
from rank_server.attention import group_merge
from rank_server.collectives import shm_group
from tests.exactness.pcp import MODEL, B, dealt, prompt_of
from tests.inproc import Shape, cluster

ONE_KV_HEAD = {"heads": 8, "kv_heads": 1}
LATENT = {"family": "deepseek_v2", "heads": 4}
EVERYWHERE = {way: frozenset({DecodeMode.REPLICATED, way}) for way in (DecodeMode.REPLICATED, DecodeMode.SPLIT)}
SHAPES = [
    # (tp, pcp, dcp), model
    ((1, 2, 1), MODEL),
    ((2, 2, 1), MODEL),
    ((1, 2, 2), MODEL),
    ((1, 3, 3), MODEL),
    ((2, 2, 2), MODEL),
    ((2, 2, 4), ONE_KV_HEAD),
    ((2, 1, 2), LATENT),
    ((1, 2, 2), LATENT),
]


def choice_of(plan: rank_pb2.StepPlan) -> Choice:
    """What the ranks were told."""
    mode = common_pb2.DecodeMode.Name(plan.decode_mode).removeprefix("DECODE_MODE_")
    return Choice(DecodeMode[mode], Gather[common_pb2.Gather.Name(plan.gather).removeprefix("GATHER_")])


def check(path, shape: Shape) -> set[Choice]:
    """Runs prompts in chunks beside decode rows, then a lone request; returns the ways that steps with rows went."""
    model, found = cost_model(open_model(path).shape, shape.config()), set()
    with cluster(path, shape) as running:
        running.generate([prompt_of(n) for n in (3, 8, 5, 30)], 4)
        running.generate([prompt_of(6)], 3)
        for step, plan, results in zip(running.steps, running.plans, running.results, strict=True):
            if not plan.rows:
                continue
            choice = choice_of(plan)
            # Embeddings are summed, and logits gathered, over whoever has a part of the vocabulary.
            ends = (shape.tp > 1) + (shape.tp > 1 or choice.decode_mode is DecodeMode.SPLIT)
            predicted = work_of(choice, step.facts, model).rounds
            assert [result.collectives - ends for result in results] == [predicted] * len(results), (choice, step.facts)
            found.add(choice)
    return found


@pytest.fixture(params=["packed", "lent", "scaled"])
def way_back(request, monkeypatch) -> dict[str, str]:
    """How partials come back; large ones are lent, here all."""
    if request.param == "lent":
        monkeypatch.setattr(group_merge, "APART_BYTES", 0)
        monkeypatch.setattr(shm_group, "LENT_BYTES", 0)
        return {"collectives": "shm"}
    return {"merge": "ag_rs"} if request.param == "scaled" else {}


@pytest.mark.parametrize(
    ("grid", "model", "gather"),
    [(*each, gather) for each in SHAPES for gather in ("q", "kv", "kv_all") if each[0][2] > 1 or gather == "kv"],
    ids=str,
)
def test_of_rows_that_are_dealt_out(tiny, grid, model, gather, way_back):
    found = check(tiny(**model), dealt(*grid, gather, budget=11, **way_back))
    assert {choice.decode_mode for choice in found} == {DecodeMode.OWNER}
    # Steps of decode rows alone gather nothing else, but where latents come to all rows.
    alone = set() if model is LATENT and gather == "kv_all" else {Gather.NONE}
    assert {choice.gather for choice in found} == {Gather[gather.upper()]} | alone


@pytest.mark.parametrize(
    ("grid", "model", "way"),
    [(*each, way) for each in SHAPES for way in EVERYWHERE if way is DecodeMode.REPLICATED or each[1] is not LATENT],
    ids=str,
)
def test_of_rows_that_every_replica_has(tiny, grid, model, way, way_back):
    tp, pcp, dcp = grid
    shape = Shape(tp=tp, pcp=pcp, dcp=dcp, block_size=B, budget=11, ways=EVERYWHERE[way], **way_back)
    assert {choice.decode_mode for choice in check(tiny(**model), shape)} == EVERYWHERE[way]
