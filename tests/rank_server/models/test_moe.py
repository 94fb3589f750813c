"""Routers and experts against the modules of `transformers`."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from cp_layout.model_shape import MoeShape
from rank_server.models.linear import gated, linear
from rank_server.models.moe import Ffn, Mixture, Router

HIDDEN, EXPERTS, WIDTH, SHARED = 16, 12, 5, 2
CASES = {
    "softmax": ("deepseek_v2", {"topk_method": "greedy"}, MoeShape(EXPERTS, 3, WIDTH, SHARED, 0, "greedy", scaling_factor=1.7)),
    "softmax in groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        MoeShape(EXPERTS, 3, WIDTH, SHARED, 0, "group_limited_greedy", 4, 2, scaling_factor=1.7),
    ),
    "sigmoid in groups, normalised": (
        "deepseek_v3",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        MoeShape(EXPERTS, 3, WIDTH, SHARED, 0, "noaux_tc", 4, 2, True, 1.7),
    ),
    "sigmoid in one group": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        MoeShape(EXPERTS, 3, WIDTH, SHARED, 0, "noaux_tc", 1, 1, False, 1.7),
    ),
}


def reference(name: str) -> tuple[torch.nn.Module, MoeShape]:
    family, settings, shape = CASES[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        moe_intermediate_size=WIDTH,
        n_shared_experts=SHARED,
        routed_scaling_factor=1.7,
        **settings,
    )
    torch.manual_seed(4)
    module = (DeepseekV2Moe if family == "deepseek_v2" else DeepseekV3MoE)(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0.0, 0.7)
        for buffer in module.buffers():
            buffer.normal_(0.0, 0.3)
    return module, shape


def ffn(gate: Tensor, up: Tensor, down: Tensor) -> Ffn:
    return Ffn(gated(gate, up), linear(down))


def mixture(module: torch.nn.Module, shape: MoeShape, member: int = 0, tp: int = 1) -> Mixture:
    """What member `member` of `tp` holds, cut by hand."""
    held = range(member * EXPERTS // tp, (member + 1) * EXPERTS // tp)
    shared = module.shared_experts
    columns = slice(member * WIDTH * SHARED // tp, (member + 1) * WIDTH * SHARED // tp)
    return Mixture(
        router=Router(shape, module.gate.weight, getattr(module.gate, "e_score_correction_bias", None)),
        experts={e: ffn(*module.experts.gate_up_proj[e].chunk(2), module.experts.down_proj[e]) for e in held},
        shared=ffn(
            shared.gate_proj.weight[columns], shared.up_proj.weight[columns], shared.down_proj.weight[:, columns].contiguous()
        ),
    )


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_experts_and_their_weights_are_those_of_transformers(name: str) -> None:
    module, shape = reference(name)
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(1))
    _, wanted_weights, wanted = module.gate(x)
    chosen, weights = mixture(module, shape).router(x)
    order, wanted_order = chosen.argsort(), wanted.argsort()
    assert torch.equal(chosen.gather(1, order), wanted.gather(1, wanted_order))
    torch.testing.assert_close(weights.gather(1, order), wanted_weights.gather(1, wanted_order))
    assert len(chosen.unique()) > EXPERTS // 2


@torch.inference_mode()
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_members_add_up_to_the_whole(name: str, tp: int) -> None:
    module, shape = reference(name)
    x = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(2))
    total = sum(mixture(module, shape, member, tp)(x) for member in range(tp))
    torch.testing.assert_close(total, module(x), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_choice_is_made_in_fp32() -> None:
    """Two experts whose scores bfloat16 can't tell apart."""
    shape = MoeShape(2, 1, 1, 1, 0, "greedy")
    router = Router(shape, torch.tensor([[1.0, 0.0], [1.0, 0.001]]), None)
    chosen, _ = router(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16))
    assert chosen.tolist() == [[1], [0]]


@torch.inference_mode()
def test_no_token_is_no_work() -> None:
    module, shape = reference("softmax")
    assert mixture(module, shape)(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)
