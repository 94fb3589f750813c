"""Laws of the cut: members' parts tile every tensor, heads stay whole, queries sit beside their keys."""

from dataclasses import replace

import pytest

from cp_layout.model_shape import ModelShape
from model_files import expected_tensors
from rank_server.models.sharding import RULES, key_heads, part_of, query_heads, resident_tensors, vocabulary

SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=48,
    num_heads=12,
    num_kv_heads=3,
    head_dim=4,
    intermediate_size=100,
    vocab_size=323,
    max_position=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=False,
    dtype="float32",
)
SIZES = [1, 3, 6, 12]
TIED = replace(SHAPE, tie_embeddings=True)
BIASED = replace(SHAPE, qkv_bias=True)
NORMED = replace(SHAPE, qk_norm=True, head_dim=6)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("shape", [SHAPE, TIED, BIASED, NORMED], ids=["untied", "tied", "biased", "normed"])
def test_parts_tile_every_tensor(shape, tp):
    """Cut axis: contiguous, gapless, in member order; a shared KV head is counted once. Norms are whole everywhere."""
    for name, dims in expected_tensors(shape).items():
        parts = [part_of(name, dims, shape, tp, i) for i in range(tp)]
        rule = RULES[name.split(".")[-2]]
        if rule is None:
            assert all(part.dims == dims for part in parts)
            continue
        spans = [part.rows if rule.axis == "rows" else part.columns for part in parts]
        distinct = list(dict.fromkeys(spans))
        assert [start for start, _ in distinct] == [0] + [stop for _, stop in distinct[:-1]]
        assert distinct[-1][1] == dims[0 if rule.axis == "rows" else 1]
        shared = tp > shape.num_kv_heads and (".k_proj." in name or ".v_proj." in name)
        assert len(distinct) == (shape.num_kv_heads if shared else tp)
        uncut = [part.columns if rule.axis == "rows" else part.rows for part in parts]
        assert set(uncut) == ({None} if rule.axis == "rows" else {(0, dims[0])})


@pytest.mark.parametrize("tp", SIZES)
def test_members_hold_the_keys_of_their_queries(tp):
    group = SHAPE.num_heads // SHAPE.num_kv_heads
    for i in range(tp):
        first, last = query_heads(SHAPE, tp, i)
        assert key_heads(SHAPE, tp, i) == (first // group, (last - 1) // group + 1)


@pytest.mark.parametrize("tp", SIZES)
def test_output_columns_are_the_projected_query_rows(tp):
    dims = expected_tensors(SHAPE)
    for i in range(tp):
        query, output = (
            part_of(name, dims[name], SHAPE, tp, i)
            for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight")
        )
        assert query.rows == output.columns
        assert query.rows[0] % SHAPE.head_dim == query.rows[1] % SHAPE.head_dim == 0


@pytest.mark.parametrize("tp", [7, 9, 322])
def test_vocabulary_and_ffn_need_not_divide(tp):
    sizes = [stop - start for start, stop in (vocabulary(SHAPE, tp, i) for i in range(tp))]
    assert sum(sizes) == 323
    assert max(sizes) - min(sizes) == 1
    assert max(sizes) == -(-323 // tp)


def test_resident_tensors_of_a_member():
    """Member 4 of 6: query heads 8 and 9, KV head 2, FFN columns [66, 83), ids [215, 269)."""
    resident = {tensor.name: tensor for tensor in resident_tensors(SHAPE, 6, 4)}
    assert list(resident)[:7] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert len(resident) == 2 * 6 + 3
    qkv = resident["model.layers.1.self_attn.qkv_proj.weight"]
    assert [(part.name.split(".")[-2], part.rows) for part in qkv.parts] == [
        ("q_proj", (32, 40)),
        ("k_proj", (8, 12)),
        ("v_proj", (8, 12)),
    ]
    assert qkv.dims == (16, 48)
    assert qkv.num_elements == 16 * 48
    assert resident["model.layers.0.mlp.gate_up_proj.weight"].dims == (34, 48)
    assert resident["model.layers.0.mlp.down_proj.weight"].dims == (48, 17)
    assert resident["model.embed_tokens.weight"].dims == resident["lm_head.weight"].dims == (54, 48)
    assert resident["model.norm.weight"].dims == (48,)


@pytest.mark.parametrize("tp", SIZES)
def test_biases_are_cut_and_stacked_with_their_rows(tp):
    for i in range(tp):
        resident = {tensor.name: tensor for tensor in resident_tensors(BIASED, tp, i)}
        rows, bias = (resident[f"model.layers.1.self_attn.qkv_proj.{kind}"] for kind in ("weight", "bias"))
        assert [part.name.replace("weight", "bias") for part in rows.parts] == [part.name for part in bias.parts]
        assert [part.rows for part in rows.parts] == [part.rows for part in bias.parts]
        assert bias.dims == rows.dims[:1]


def test_head_norms_are_whole_on_every_member():
    for i in range(6):
        resident = {tensor.name: tensor.dims for tensor in resident_tensors(NORMED, 6, i)}
        assert resident["model.layers.0.self_attn.q_norm.weight"] == resident["model.layers.0.self_attn.k_norm.weight"] == (6,)


def test_a_tied_head_is_not_held_twice():
    assert "lm_head.weight" not in {tensor.name for tensor in resident_tensors(TIED, 3, 1)}


def test_a_tensor_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match="gate_bias"):
        part_of("model.layers.0.mlp.gate_bias.weight", (4,), SHAPE, 1, 0)
