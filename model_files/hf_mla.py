"""Latent attention and mixtures of experts as the config.json of the DeepSeek families describes them.

Where the reference implementation would ignore a setting that changes the mathematics, it is refused.
"""

from pathlib import Path
from typing import get_args

from cp_layout.model_shape import MlaShape, MoeShape, TopkMethod
from model_files.errors import ModelRefused
from model_files.families import Family
from model_files.fields import Fields
from model_files.hf_rope import yarn_score_factor

_SPARSE = ("index_topk", "index_n_heads", "index_head_dim")
_PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers")


def mla_from_config(fields: Fields, family: Family, origin: Path, heads: int) -> MlaShape:
    """The attention of a model of `heads` heads; `ModelRefused` for sparse attention and for what is out of bounds."""
    for name in _SPARSE:
        if fields.get(name) is not None:
            raise fields.refusal(name, f"= {fields.get(name)!r} asks for sparse attention, which is not supported")
    for name in _PREDICTION:
        if fields.get(name, 0) != 0:
            raise fields.refusal(
                name, f"= {fields.get(name)!r} asks for multi-token prediction, which is not supported, only 0"
            )
    if not fields.states("q_lora_rank"):
        raise ModelRefused(f"{origin}: setting q_lora_rank is missing, null says that queries are projected at once")
    shape = MlaShape(
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        rope_interleave=fields.flag("rope_interleave", True),
        score_factor=yarn_score_factor(fields, origin),
    )
    if shape.qk_rope_head_dim % 2:
        raise fields.refusal("qk_rope_head_dim", f"= {shape.qk_rope_head_dim} is odd, rotary positions need pairs")
    if family.model_type == "deepseek_v2":
        fields.only("rope_interleave", True)
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", shape.qk_rope_head_dim)
    fields.only("qk_head_dim", shape.qk_head_dim)
    return shape


def moe_from_config(fields: Fields, family: Family, num_layers: int) -> MoeShape | None:
    """The experts, None when every layer is dense; `ModelRefused` names a router that is unknown and sizes that do not fit."""
    first = 0 if fields.get("first_k_dense_replace") == 0 else fields.count("first_k_dense_replace")
    if first >= num_layers:
        return None
    fields.only("moe_layer_freq", 1)
    method = _topk_method(fields, family)
    grouped = method != "greedy"
    shape = MoeShape(
        num_experts=fields.count("n_routed_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        num_shared_experts=fields.count("n_shared_experts"),
        first_dense_layers=first,
        topk_method=method,
        num_groups=fields.count("n_group") if grouped else 1,
        groups_per_token=fields.count("topk_group") if grouped else 1,
        normalise=fields.flag("norm_topk_prob", method == "noaux_tc"),
        scaling_factor=fields.real("routed_scaling_factor", 2.5 if method == "noaux_tc" else 1.0),
    )
    if family.model_type == "deepseek_v2":
        fields.only("norm_topk_prob", False)
    _check_groups(fields, shape)
    return shape


def _topk_method(fields: Fields, family: Family) -> TopkMethod:
    if family.model_type == "deepseek_v3":
        fields.only("scoring_func", "sigmoid")
        fields.only("topk_method", "noaux_tc")
        return "noaux_tc"
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    named = fields.get("topk_method", "greedy")
    return next(method for method in get_args(TopkMethod) if method == named)


def _check_groups(fields: Fields, shape: MoeShape) -> None:
    experts, groups = shape.num_experts, shape.num_groups
    if experts % groups:
        raise fields.refusal("n_group", f"= {groups} does not divide {experts} experts")
    if shape.groups_per_token > groups:
        raise fields.refusal("topk_group", f"= {shape.groups_per_token} is more than {groups} groups")
    if shape.topk_method == "noaux_tc" and experts // groups < 2:
        raise fields.refusal("n_group", f"= {groups} leaves {experts // groups} of {experts} experts in a group, at least 2")
    within_reach = experts // groups * shape.groups_per_token
    if shape.experts_per_token > within_reach:
        raise fields.refusal("num_experts_per_tok", f"= {shape.experts_per_token} is more than {within_reach} within reach")
