"""What a rank keeps of the loaded weights."""

import gc

import pytest
import torch

from model_files import open_model
from rank_server.models import resident
from rank_server.models.linear import DenseLinear, packs
from rank_server.models.table import load_weights, resident_weights
from tests.devices import CPU

packable = pytest.mark.skipif(
    not packs(torch.empty(1, 1, dtype=torch.bfloat16)), reason="the CPU has no bfloat16 products in torch's oneDNN"
)


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


@packable
def test_a_packed_matrix_gives_its_first_copy_up(tiny):
    shape, weights = loaded(tiny(), torch.bfloat16)
    pointers = {tensor.untyped_storage().data_ptr() for name, tensor in weights.items() if "proj" in name}
    kept = resident_weights(shape, weights, 2)
    gc.collect()
    held = [item.untyped_storage().data_ptr() for item in gc.get_objects() if type(item) is torch.Tensor and not item.is_mkldnn]
    assert kept.num_parts == 2
    assert not pointers & set(held)


@packable
@pytest.mark.parametrize(("bound", "packed"), [(1 << 20, True), (16, False)])
def test_only_a_small_tied_head_is_packed_beside_its_embedding(tiny, monkeypatch, bound, packed):
    monkeypatch.setattr(resident, "TIED_COPY_BYTES", bound)
    shape, weights = loaded(tiny(tie=True), torch.bfloat16)
    kept = resident_weights(shape, weights, 2)
    assert all(isinstance(part, DenseLinear) is not packed for part in kept.head.parts)
    if not packed:
        assert kept.head.whole[0].weight is kept.embedding
