"""What the engines of a side are allowed to plan, from the configuration and the model."""

from dataclasses import replace

import pytest

from coordinator.dispatch import Dispatcher
from coordinator.engine import Engine
from coordinator.plan import DecodeMode, Gather, Sampling
from coordinator.request import Request
from coordinator.set_maker import SetMaker
from coordinator.text_worker import TextWorker
from cp_layout.model_shape import MlaShape
from cp_wire.pb import common_pb2
from cp_wire.sides import Side
from tests.coordinator.harness import FAST, SHAPE, FakeText, cluster_config

GROUPED = replace(SHAPE, num_layers=24, hidden_size=1024, num_heads=16, num_kv_heads=2, head_dim=64, intermediate_size=4096)
LATENT = replace(GROUPED, num_kv_heads=1, mla=MlaShape(None, 512, 128, 64, 128))
NEW_TOKENS = 6


def engine(shape, **config) -> Engine:
    """Of the first set."""
    side = Side(cluster_config(max_num_batched_tokens=64, **config))
    maker = SetMaker(side, shape, Dispatcher(), TextWorker(FakeText(), 1.0), FAST, 10, lambda spec: lambda: None)
    return maker.engine(maker.specs()[0], 64)


def planned(shape, prompts, **config) -> list[tuple[DecodeMode, Gather, bool]]:
    """Mode and gather of each step that computes the prompts and some tokens more, and whether all its rows are decode rows."""
    scheduler = engine(shape, **config).scheduler
    for handle, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0, max_tokens=NEW_TOKENS)
        scheduler.add(Request(handle=handle, request_id=f"{handle}", prompt=prompt, sampling=sampling, salt=b""))
    chosen = []
    while (step := scheduler.schedule()) is not None:
        if step.rows:
            chosen.append((step.decode_mode, step.gather, all(row.start >= len(prompts[row.handle]) for row in step.rows)))
        scheduler.commit(step, {row.handle: 7 for row in step.rows if row.sample}, {})
    return chosen


@pytest.mark.parametrize("gather", ["auto", "q", "kv"])
@pytest.mark.parametrize(("pcp", "dcp"), [(2, 1), (2, 2), (3, 3)])
def test_a_pass_of_a_model_with_latents_is_never_split(pcp, dcp, gather):
    """A lone request's decode rows: replicas of a model that can be split are asked for it."""
    prompts = [list(range(5))]
    lone = planned(LATENT, prompts, pcp=pcp, dcp=dcp, mla_gather=gather)
    assert len(lone) == NEW_TOKENS
    assert DecodeMode.SPLIT not in {mode for mode, _, _ in lone}
    if (dcp, gather) == (2, "q"):
        assert {mode for mode, _, decodes in lone if decodes} == {DecodeMode.REPLICATED}
    assert DecodeMode.SPLIT in {mode for mode, _, _ in planned(GROUPED, prompts, pcp=pcp, dcp=dcp)}


@pytest.mark.parametrize(("flag", "gathers"), [("q", {Gather.Q, Gather.NONE}), ("kv", {Gather.KV_ALL})])
def test_what_rows_gather_of_latents_can_be_forced(flag, gathers):
    """With kv, decode rows too; with q, theirs need no gather to be named."""
    chosen = planned(LATENT, [list(range(40)), list(range(50, 53))], pcp=2, dcp=2, mla_gather=flag)
    assert {gather for _, gather, _ in chosen} == gathers


@pytest.mark.parametrize(("merge", "rounds"), [(common_pb2.MERGE_A2A, 1), (common_pb2.MERGE_AG_RS, 2)])
def test_prices_know_how_partials_come_back(merge, rounds):
    assert engine(GROUPED, merge=merge).pricing.prices.model.merge_rounds == rounds
