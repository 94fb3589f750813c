"""What a rank keeps of the loaded weights."""

import pytest
import torch

from model_files import open_model
from rank_server.models.table import load_weights, resident_weights
from tests.devices import CPU


def loaded(path, dtype):
    files = open_model(path)
    return files.shape, load_weights(files, 1, 0, dtype, lambda done, total: None, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_everything_that_was_loaded_is_taken_over(tiny, family, dtype):
    shape, weights = loaded(tiny(family=family), dtype)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    kept = resident_weights(shape, weights, 3)
    assert weights == {}
    assert kept.nbytes == nbytes
    assert kept.dtype == dtype
    assert kept.num_parts == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_held_once_whole_and_in_parts(tiny, dtype, tied):
    shape, weights = loaded(tiny(tie=tied), dtype)
    storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    kept = resident_weights(shape, weights, 2)
    assert (kept.head.whole.weight is kept.embedding) == tied
    matrices = [kept.head.whole, *kept.head.parts]
    for layer in kept.layers:
        for each in (layer.whole, *layer.parts):
            matrices += [each.qkv, each.output, each.ffn.down]
            assert {half.untyped_storage().data_ptr() for half in (each.ffn.gated.gate, each.ffn.gated.up)} <= storages
    assert {each.weight.untyped_storage().data_ptr() for each in matrices} <= storages
