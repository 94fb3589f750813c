"""One row per architecture; anything else is refused by name, before a byte of it is read."""

from dataclasses import replace

import pytest
import torch

from model_files import ModelRefused, open_model
from model_files.families import FAMILIES
from rank_server.collectives.solo import SoloGroup
from rank_server.models.decoder import DecoderModel
from rank_server.models.table import build_model, load_weights, resident_weights
from tests.devices import CPU
from tests.model_files.tiny_checkpoint import write_hf


@pytest.fixture
def files(tmp_path):
    return open_model(write_hf(tmp_path / "model"))


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES.values()])
def test_every_family_is_built(tiny, family):
    files = open_model(tiny(family=family))
    assert FAMILIES[files.shape.architecture].model_type == family
    weights = load_weights(files, 1, 0, torch.float32, lambda done, total: None, CPU)
    assert isinstance(build_model(files.shape, resident_weights(files.shape, weights, 1), SoloGroup("tp:0")), DecoderModel)


def test_other_architectures_are_refused_by_name(files):
    other = replace(files, shape=replace(files.shape, architecture="HeronForCausalLM"))
    reads: list[int] = []
    with pytest.raises(ModelRefused, match="architecture HeronForCausalLM is not supported, only LlamaForCausalLM"):
        load_weights(other, 1, 0, torch.float32, lambda done, total: reads.append(done), CPU)
    assert reads == []
    with pytest.raises(ModelRefused, match="HeronForCausalLM"):
        resident_weights(other.shape, {}, 1)
