"""Loading: the right numbers in the right rows, nothing read that is not needed, faults named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from model_files import ModelFiles, open_model
from rank_server.models import weights as weight_files
from rank_server.models.sharding import resident_tensors
from rank_server.models.weights import ALIGNMENT, WeightError, load_weights
from tests.devices import CPU
from tests.model_files.tiny_checkpoint import tiny_weights, write_gguf, write_hf, write_sharded


def ignore(done: int, total: int) -> None:
    """No progress wanted."""


class Watched:
    """A model whose reads are recorded and can be made to fail."""

    def __init__(self, files: ModelFiles) -> None:
        self.path, self.shape, self.tensors = files.path, files.shape, dict(files.tensors)
        self.reads: list[tuple[str, int, int, tuple[int, int] | None]] = []
        self.failing: dict[str, Exception] = {}
        self._files = files

    def read_rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None) -> np.ndarray:
        self.reads.append((name, start, stop, columns))
        if name in self.failing:
            raise self.failing[name]
        return self._files.read_rows(name, start, stop, columns)


@pytest.fixture
def hf(tmp_path):
    return open_model(write_hf(tmp_path / "model"))


@pytest.fixture
def watched(hf):
    return Watched(hf)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_member_holds_its_slice_in_both_formats(tmp_path, tp):
    """4 heads of 8, 2 KV heads, FFN 64, vocabulary 300; TP 3 is refused for its heads elsewhere, here it cuts 1, 1 and 2."""
    expected = tiny_weights()
    opened = [
        open_model(write_sharded(tmp_path / "sharded")),
        open_model(write_gguf(tmp_path / "model.gguf", matrices=GGMLQuantizationType.F32)),
    ]
    for index in range(tp):
        q0, q1 = index * 4 // tp * 8, (index + 1) * 4 // tp * 8
        k0 = index * 2 // tp * 8
        k1 = (index + 1) * 2 // tp * 8 if tp <= 2 else k0 + 8
        f0, f1 = index * 64 // tp, (index + 1) * 64 // tp
        v0, v1 = index * 300 // tp, (index + 1) * 300 // tp
        layer = {name.removeprefix("model.layers.1."): w for name, w in expected.items() if ".1." in name}
        wanted = {
            "model.embed_tokens.weight": expected["model.embed_tokens.weight"][v0:v1],
            "lm_head.weight": expected["lm_head.weight"][v0:v1],
            "model.norm.weight": expected["model.norm.weight"],
            "model.layers.1.input_layernorm.weight": layer["input_layernorm.weight"],
            "model.layers.1.self_attn.qkv_proj.weight": np.concatenate(
                [
                    layer["self_attn.q_proj.weight"][q0:q1],
                    layer["self_attn.k_proj.weight"][k0:k1],
                    layer["self_attn.v_proj.weight"][k0:k1],
                ]
            ),
            "model.layers.1.self_attn.o_proj.weight": layer["self_attn.o_proj.weight"][:, q0:q1],
            "model.layers.1.mlp.gate_up_proj.weight": np.concatenate(
                [layer["mlp.gate_proj.weight"][f0:f1], layer["mlp.up_proj.weight"][f0:f1]]
            ),
            "model.layers.1.mlp.down_proj.weight": layer["mlp.down_proj.weight"][:, f0:f1],
        }
        for files in opened:
            got = load_weights(files, tp, index, torch.float32, ignore, CPU)
            assert len(got) == 2 * 6 + 3
            for name, array in wanted.items():
                assert got[name].is_contiguous()
                assert np.array_equal(got[name].numpy(), array), (files.kind, name)
            assert len({tensor.untyped_storage().data_ptr() for tensor in got.values()}) == 1, "side by side"
            assert not any(tensor.data_ptr() % ALIGNMENT for tensor in got.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_member_holds_the_biases_of_its_heads(tmp_path, tp):
    """4 heads of 8, 2 KV heads; at TP 4 two members hold the same KV head and its biases."""
    files = open_model(write_gguf(tmp_path / "model.gguf", family="qwen2"))
    query, key, value = (tiny_weights(family="qwen2")[f"model.layers.1.self_attn.{kind}_proj.bias"] for kind in "qkv")
    for index in range(tp):
        q = slice(index * 4 // tp * 8, (index + 1) * 4 // tp * 8)
        k = slice(index * 2 // tp * 8, index * 2 // tp * 8 + 16 // min(tp, 2))
        got = load_weights(files, tp, index, torch.float32, ignore, CPU)["model.layers.1.self_attn.qkv_proj.bias"]
        assert np.array_equal(got.numpy(), np.concatenate((query[q], key[k], value[k])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_once(hf, dtype):
    got = load_weights(hf, 2, 1, dtype, ignore, CPU)["model.layers.0.mlp.down_proj.weight"]
    exact = torch.from_numpy(tiny_weights()["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(got, exact[:, 32:].to(dtype))


def test_quantised_tensors_are_dequantised_before_the_cut(tmp_path):
    """A cut at column 21 of 64 lies inside a quantised block of 32."""
    files = open_model(write_gguf(tmp_path / "model.gguf", matrices=GGMLQuantizationType.Q8_0))
    got = load_weights(files, 3, 1, torch.float32, ignore, CPU)["model.layers.0.mlp.down_proj.weight"]
    whole = files.read_rows("model.layers.0.mlp.down_proj.weight", 0, 32)
    assert np.array_equal(got.numpy(), whole[:, 21:42])


def test_only_the_members_part_is_read_and_each_row_once(watched):
    load_weights(watched, 2, 1, torch.float32, ignore, CPU)
    parts = [part for resident in resident_tensors(watched.shape, 2, 1) for part in resident.parts]
    wanted = {(part.name, *part.rows, part.columns) for part in parts}
    assert len(watched.reads) == len(wanted)
    assert set(watched.reads) == wanted
    assert ("model.layers.0.self_attn.q_proj.weight", 16, 32, None) in wanted
    assert ("model.layers.0.self_attn.o_proj.weight", 0, 32, (16, 32)) in wanted
    assert ("model.layers.1.mlp.down_proj.weight", 0, 32, (32, 64)) in wanted


def test_memory_beside_the_result_is_bounded(watched, monkeypatch):
    whole = load_weights(watched, 2, 0, torch.float32, ignore, CPU)
    watched.reads.clear()
    monkeypatch.setattr(weight_files, "READ_BYTES", 1000)
    blocks = load_weights(watched, 2, 0, torch.float32, ignore, CPU)
    for name, start, stop, columns in watched.reads:
        width = columns[1] - columns[0] if columns else int(np.prod(watched.tensors[name].shape[1:]))
        assert 4 * (stop - start) * width <= 1000
    assert len(watched.reads) > 90
    assert all(torch.equal(blocks[name], tensor) for name, tensor in whole.items())


def test_a_row_larger_than_the_bound_is_read_alone(watched, monkeypatch):
    monkeypatch.setattr(weight_files, "READ_BYTES", 1)
    load_weights(watched, 1, 0, torch.float32, ignore, CPU)
    assert all(stop - start == 1 for _, start, stop, _ in watched.reads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_progress_counts_the_bytes_in_memory(hf, dtype):
    seen: list[tuple[int, int]] = []
    got = load_weights(hf, 2, 0, dtype, lambda done, total: seen.append((done, total)), CPU)
    total = sum(tensor.nbytes for tensor in got.values())
    assert {t for _, t in seen} == {total}
    assert seen[-1][0] == total
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) >= len(got)


def test_a_missing_tensor_is_named_before_anything_is_read(watched):
    del watched.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        WeightError, match=r"model.*tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \[64, 32\] is missing"
    ):
        load_weights(watched, 1, 0, torch.float32, ignore, CPU)
    assert watched.reads == []


def test_a_wrong_shape_is_named_with_both_shapes_and_the_file(watched):
    name = "model.layers.0.self_attn.k_proj.weight"
    watched.tensors[name] = replace(watched.tensors[name], shape=(32, 32))
    with pytest.raises(
        WeightError, match=r"model\.safetensors: tensor .*k_proj\.weight has shape \[32, 32\], the model needs \[16, 32\]"
    ):
        load_weights(watched, 1, 0, torch.float32, ignore, CPU)


@pytest.mark.parametrize("fault", [OSError("input/output error"), ValueError("cannot reshape")])
def test_a_failing_read_names_rows_tensor_and_file(watched, fault):
    watched.failing["model.layers.1.mlp.down_proj.weight"] = fault
    with pytest.raises(
        WeightError, match=rf"model\.safetensors: rows 0\.\.32 of tensor .*down_proj.* can't be read \({fault}\)"
    ):
        load_weights(watched, 2, 0, torch.float32, ignore, CPU)


def test_a_file_cut_short_after_it_was_opened(hf):
    with (hf.path / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(WeightError, match="can't be read"):
        load_weights(hf, 1, 0, torch.float32, ignore, CPU)
