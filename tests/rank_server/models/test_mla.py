"""The DeepSeek decoder against `transformers` in fp32, alone and over tensor-parallel cuts."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident

import pytest
import torch
from torch import Tensor

from cp_layout.cuts import cut
from model_files import expected_tensors, open_model
from rank_server.attention.latent import UpProjection
from rank_server.models.mla import MlaModel
from rank_server.models.moe import Router
from rank_server.models.sharding import RULES, part_of, resident_tensors
from rank_server.models.table import load_weights, up_projections
from tests.exactness.test_mla import MODELS
from tests.rank_server.models.tensor_parallel import CPU, on_members
from tests.tiny_models import logits_reference

TOLERANCE = 1e-4
IDS = [(7 * i * i + 11 * i) % 320 for i in range(29)]


class DenseLatentAttention:
    """`attend` of one sequence with every key and value spelled out."""

    def __init__(self, scale: float, ups: Sequence[UpProjection]) -> None:
        self._scale = scale
        self._ups = ups

    def __call__(self, layer: int, q: Tensor, latents: Tensor) -> Tensor:
        keys, values = self._ups[layer].expand(latents[:, 0])
        scores = torch.einsum("thd,hsd->hts", q.float(), keys.float()) * self._scale
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hts,hsd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), values.float()).to(q.dtype)


def whole_prompt(path: Path) -> Callable[[MlaModel], Tensor]:
    scale = open_model(path).shape.score_scale

    def logits(model: MlaModel) -> Tensor:
        attend = DenseLatentAttention(scale, up_projections(model.weights))
        return model.logits(model.forward(torch.tensor(IDS), torch.arange(len(IDS)), attend))

    return logits


@pytest.mark.parametrize("answered", [[], [len(IDS) - 1], [0, 5]])
def test_rows_that_nobody_asks_for_are_left_out_at_the_end(tiny, answered):
    path = tiny(**MODELS[next(iter(MODELS))])

    def some(model: MlaModel, group: object) -> Tensor:
        attend = DenseLatentAttention(open_model(path).shape.score_scale, up_projections(model.weights))
        rows = torch.tensor(answered, dtype=torch.int64)
        return model.logits(model.forward(torch.tensor(IDS), torch.arange(len(IDS)), attend, answered=rows))

    (found,), (wanted,) = on_members(path, 1, some), on_members(path, 1, lambda model, group: whole_prompt(path)(model))
    assert torch.allclose(found[answered], wanted[answered], atol=TOLERANCE)
    assert int(found.any(1).sum()) == len(answered)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tiny, name, tp):
    path = tiny(**MODELS[name])
    expected = logits_reference(path, IDS)
    logits = on_members(path, tp, lambda model, group: (whole_prompt(path)(model), group.calls))
    for got, calls in logits:
        assert float((got - expected).abs().max()) <= TOLERANCE
        assert torch.equal(got, logits[0][0])
        assert calls == (0 if tp == 1 else 2 * 2 + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_all_members_pick_the_same_experts_with_the_same_weights(tiny, monkeypatch, name, dtype):
    """To the bit: a member that picked another one would leave it out, or add it twice."""
    plain, picked = Router.__call__, defaultdict(list)

    def watched(self, x):
        found = plain(self, x)
        picked[get_ident()].append(found)
        return found

    monkeypatch.setattr(Router, "__call__", watched)
    on_members(tiny(**MODELS[name]), 4, lambda model, group: whole_prompt(tiny(**MODELS[name]))(model), dtype)
    first, *others = picked.values()
    assert len(others) == 3 and len(first) == 1
    for other in others:
        for (experts, weights), (same_experts, same_weights) in zip(first, other, strict=True):
            assert torch.equal(experts, same_experts) and torch.equal(weights, same_weights)


@pytest.mark.parametrize("changed", [{"rope_interleave": False}, {"first_k_dense_replace": 2}, {"first_k_dense_replace": 0}])
def test_rotary_halves_and_layers_of_one_kind(tiny, changed):
    path = tiny(family="deepseek_v3", mla={"q_lora_rank": 24} | changed)
    got = on_members(path, 2, lambda model, group: whole_prompt(path)(model))[0]
    assert float((got - logits_reference(path, IDS)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("tensor", ["kv_b_proj", "o_proj", "qkv_proj", "q_b_proj"])
def test_the_oracle_notices_swapped_heads(tiny, monkeypatch, tensor):
    """The seeded model tells heads apart: exchanging halves of any matrix of attention moves the logits."""
    from tests.rank_server.models import tensor_parallel

    path = tiny(**MODELS["v3"])

    def rolled(*args):
        weights = load_weights(*args)
        name = f"model.layers.1.self_attn.{tensor}.weight"
        weights[name] = weights[name].roll(weights[name].shape[0] // 4, 0)
        return weights

    monkeypatch.setattr(tensor_parallel, "load_weights", rolled)
    changed = on_members(path, 1, lambda model, group: whole_prompt(path)(model))[0]
    assert float((changed - logits_reference(path, IDS)).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_low_precision_stays_near(tiny, tp):
    """Without experts, whose choice would jump."""
    path = tiny(family="deepseek_v3", mla={"q_lora_rank": 24, "first_k_dense_replace": 2})
    expected = logits_reference(path, IDS)
    logits = on_members(path, tp, lambda model, group: whole_prompt(path)(model), torch.bfloat16)[0]
    assert logits.dtype == torch.float32
    assert float((logits - expected).pow(2).mean().sqrt() / expected.std()) < 0.1


@pytest.mark.parametrize("name", MODELS)
def test_parts_tile_every_tensor(tiny, name):
    shape = open_model(tiny(**MODELS[name])).shape
    for tp in (1, 2, 4, 8):
        for tensor, dims in expected_tensors(shape).items():
            if ".experts." in tensor:
                continue
            parts = [part_of(tensor, dims, shape, tp, i) for i in range(tp)]
            kind, parent = tensor.split(".")[-2], ".".join(tensor.split(".")[-3:-1])
            rule = RULES[parent] if parent in RULES else RULES[kind]
            if rule is None:
                assert all(part.dims == dims for part in parts)
                continue
            spans = [part.rows if rule.axis == "rows" else part.columns for part in parts]
            assert [first for first, _ in spans] == [0] + [last for _, last in spans[:-1]]
            assert spans[-1][1] == dims[0 if rule.axis == "rows" else 1]


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_every_expert_is_whole_on_one_member(tiny, tp):
    shape = open_model(tiny(**MODELS["v2-lite"])).shape
    held = []
    for member in range(tp):
        resident = {tensor.name: tensor for tensor in resident_tensors(shape, tp, member)}
        mine = [e for e in range(8) if f"model.layers.1.mlp.experts.{e}.down_proj.weight" in resident]
        assert mine == list(range(*cut(8, tp, member)))
        for expert in mine:
            assert resident[f"model.layers.1.mlp.experts.{expert}.gate_up_proj.weight"].dims == (40, 64)
        held += mine
    assert held == list(range(8))


def test_only_what_decides_about_experts_stays_in_fp32(tiny):
    weights = load_weights(open_model(tiny(**MODELS["v3"])), 1, 0, torch.bfloat16, lambda done, total: None, CPU)
    assert {name for name, tensor in weights.items() if tensor.dtype == torch.float32} == {
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
