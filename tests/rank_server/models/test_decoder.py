"""The model against `transformers` in fp32, alone and over every kind of tensor-parallel cut."""

import random

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model_files import open_model
from rank_server.collectives.solo import SoloGroup
from rank_server.models.decoder import DecoderModel, SplitGroups
from rank_server.models.table import build_model, load_weights, resident_weights
from tests.devices import CPU
from tests.rank_server.models.tensor_parallel import DenseAttention, on_members, whole_prompt
from tests.tiny_models import greedy_reference, logits_reference

TOLERANCE = 1e-4
SIX_HEADS = {"hidden": 48, "heads": 6, "kv_heads": 3, "ffn": 100, "vocab": 323}
CUTS = [
    # model, TP sizes: FFN 96 and 100, vocabularies 320 and 323; KV heads are shared where TP exceeds them
    ({"heads": 8, "kv_heads": 2}, [1, 2, 4, 8]),
    ({"heads": 8, "kv_heads": 1, "ffn": 101, "vocab": 331}, [2, 4, 8]),
    ({"heads": 8, "kv_heads": 8, "head_dim": 6, "layers": 3}, [1, 8]),
    ({"heads": 8, "kv_heads": 4, "shards": True, "tie": True, "vocab": 323}, [1, 2, 4]),
    (SIX_HEADS, [1, 3, 6]),
    (SIX_HEADS | {"kv_heads": 1, "tie": True}, [1, 2, 3, 6]),
    (SIX_HEADS | {"kv_heads": 2, "layers": 1}, [2, 6]),
]
CASES = [(model, tp) for model, sizes in CUTS for tp in sizes]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length + i * 31).randrange(320) for i in range(length)]


def alone(path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    files = open_model(path)
    weights = load_weights(files, 1, 0, dtype, lambda done, total: None, CPU)
    return build_model(files.shape, resident_weights(files.shape, weights, 1), SoloGroup("tp:0"))


def label(case: object) -> str:
    return "-".join(f"{k}{v}" for k, v in case.items()) if isinstance(case, dict) else f"tp{case}"


@pytest.mark.parametrize(("model", "tp"), CASES, ids=label)
def test_logits_equal_transformers(tiny, model, tp):
    path, ids = tiny(**model), prompt_of(29)
    expected = logits_reference(path, ids)
    got = on_members(path, tp, lambda llama, group: (whole_prompt(llama, ids), group.calls))
    logits, _ = got[0]
    assert logits.dtype == torch.float32
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max()) <= TOLERANCE
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
    for others, _ in got[1:]:
        assert torch.equal(others, logits)
    layers = model.get("layers", 2)
    assert {calls for _, calls in got} == {0 if tp == 1 else 2 * layers + 2}


@pytest.mark.parametrize(("model", "tp"), [(CUTS[0][0], 1), (CUTS[0][0], 4), (SIX_HEADS, 6)], ids=label)
def test_greedy_ids_equal_transformers_in_chunks_and_decode(tiny, model, tp):
    path, prompt = tiny(**model), prompt_of(21)

    def generate(llama: DecoderModel, group: object) -> list[int]:
        attend, output, start = DenseAttention(), [], 0
        fed = [prompt[:8], prompt[8:20], prompt[20:]]
        while len(output) < 16:
            ids = fed.pop(0)
            hidden = llama.forward(torch.tensor(ids), torch.arange(start, start + len(ids)), attend)
            start += len(ids)
            if not fed:
                output.append(int(llama.logits(hidden[-1:]).argmax()))
                fed.append(output[-1:])
        return output

    assert on_members(path, tp, generate) == [greedy_reference(path, prompt, 16)] * tp


@torch.inference_mode()
def test_rows_of_several_requests_in_one_batch_do_not_touch(tiny):
    """Two prompts interleaved row by row, each at its own positions."""
    model, (first, second) = alone(tiny()), (prompt_of(9, 1), prompt_of(9, 2))
    attends = DenseAttention(), DenseAttention()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        for i, one in enumerate(attends):
            out[i::2] = one(layer, q[i::2], k[i::2], v[i::2])
        return out

    mixed = torch.tensor([first, second]).T.flatten()
    logits = model.logits(model.forward(mixed, torch.arange(9).repeat_interleave(2), attend))
    assert torch.allclose(logits[0::2], whole_prompt(model, first), atol=TOLERANCE)
    assert torch.allclose(logits[1::2], whole_prompt(model, second), atol=TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("answered", [[], [8], [0, 3, 4]])
def test_rows_that_nobody_asks_for_are_left_out_at_the_end(tiny, tp, answered):
    """What the cache gets of them is complete: a later row attends to all."""
    path, ids = tiny(), torch.tensor(prompt_of(10))

    def hidden_of(llama: DecoderModel, group: object) -> tuple[torch.Tensor, torch.Tensor]:
        attend = DenseAttention()
        some = llama.forward(ids[:9], torch.arange(9), attend, answered=torch.tensor(answered, dtype=torch.int64))
        return some, llama.forward(ids[9:], torch.arange(9, 10), attend)

    def whole(llama: DecoderModel, group: object) -> torch.Tensor:
        return llama.forward(ids, torch.arange(10), DenseAttention())

    for (some, after), wanted in zip(on_members(path, tp, hidden_of), on_members(path, tp, whole), strict=True):
        assert torch.allclose(after, wanted[9:], atol=TOLERANCE)
        assert torch.allclose(some[answered], wanted[answered], atol=TOLERANCE)
        assert int(some.any(1).sum()) == len(answered)


@torch.inference_mode()
@pytest.mark.parametrize("start", [0, 1000, 1_000_000])
def test_rotary_angles_equal_transformers_at_any_position(tiny, start):
    path, ids = tiny(), prompt_of(5)
    positions = torch.arange(start, start + len(ids))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q.transpose(0, 1)[None], k.transpose(0, 1)[None]))
        return torch.zeros_like(q)

    model, rotary = alone(path), LlamaRotaryEmbedding(LlamaConfig.from_pretrained(path))
    model.forward(torch.tensor(ids), torch.zeros_like(positions), attend)
    model.forward(torch.tensor(ids), positions, attend)
    plain, turned = seen[0], seen[2]
    expected = apply_rotary_pos_emb(*plain, *rotary(plain[0], positions[None]))
    assert all(torch.allclose(got, want, atol=1e-5) for got, want in zip(turned, expected, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2])
def test_low_precision_stays_near_and_answers_in_fp32(tiny, dtype, tp):
    path, ids = tiny(), prompt_of(17)
    expected = logits_reference(path, ids)
    logits = on_members(path, tp, lambda llama, group: whole_prompt(llama, ids), dtype)[0]
    assert logits.dtype == torch.float32
    error = float((logits - expected).pow(2).mean().sqrt() / expected.std())
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_bfloat16_with_heads_that_are_turned_in_place(tiny, family, tokens):
    """Alone and as parts of prompts; Qwen3 norms its heads before."""
    path, ids = tiny(family=family, head_dim=32), prompt_of(tokens)
    expected = logits_reference(path, ids)
    logits = on_members(path, 1, lambda model, group: whole_prompt(model, ids), torch.bfloat16)[0]
    assert float((logits - expected).pow(2).mean().sqrt() / expected.std()) < 0.1


@torch.inference_mode()
@pytest.mark.parametrize("tensor", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"])
def test_the_oracle_notices_swapped_parts(tiny, tensor):
    """The seeded model tells KV heads, FFN columns and heads apart: exchanging halves of any matrix moves the logits."""
    path, ids = tiny(), prompt_of(13)
    files = open_model(path)
    weights = load_weights(files, 1, 0, torch.float32, lambda done, total: None, CPU)
    name, axis = f"model.layers.1.{tensor}.weight", 1 if tensor.endswith(("o_proj", "down_proj")) else 0
    matrix = weights[name]
    if tensor.endswith("qkv_proj"):
        key_rows = matrix[64:80].clone()
        matrix[64:72], matrix[72:80] = key_rows[8:], key_rows[:8]
    else:
        weights[name] = matrix.roll(matrix.shape[axis] // 4, axis)
    changed = whole_prompt(build_model(files.shape, resident_weights(files.shape, weights, 1), SoloGroup("tp:0")), ids)
    assert float((changed - logits_reference(path, ids)).abs().max()) > 100 * TOLERANCE


@torch.inference_mode()
def test_inputs_are_not_changed(tiny):
    model, ids, positions = alone(tiny()), torch.tensor(prompt_of(4)), torch.arange(4)
    hidden = model.forward(ids, positions, DenseAttention())
    kept = hidden.clone()
    model.logits(hidden)
    assert torch.equal(hidden, kept)
    assert ids.tolist() == prompt_of(4)
    assert positions.tolist() == [0, 1, 2, 3]


def test_a_pass_is_split_only_over_groups_that_fit(tiny):
    files = open_model(tiny())
    weights = resident_weights(files.shape, load_weights(files, 1, 0, torch.float32, lambda done, total: None, CPU), 2)
    alone = SoloGroup("tp:0")
    with pytest.raises(ValueError, match=r"weights in 2 parts, member 0 of pcp:0 .* don't fit"):
        build_model(files.shape, weights, alone, SplitGroups(pcp=SoloGroup("pcp:0"), wide=SoloGroup("wide:0")))
    model = build_model(files.shape, weights, alone)
    ids = torch.tensor(prompt_of(3))
    with pytest.raises(ValueError, match="can't be split"):
        model.forward(ids, torch.arange(3), DenseAttention(), split=True)
