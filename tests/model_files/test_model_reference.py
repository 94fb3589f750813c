"""Against `transformers`: checkpoints that it writes, and the default GGUF as it reads it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_client.default_model import default_model_path
from model_files import expected_tensors, open_model


@pytest.mark.parametrize(("tied", "max_shard_size"), [(False, "16KB"), (False, "5GB"), (True, "16KB")])
def test_directories_that_transformers_writes(tmp_path: Path, tied: bool, max_shard_size: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=70,
        max_position_embeddings=99,
        rope_theta=777.0,
        tie_word_embeddings=tied,
    )
    reference = LlamaForCausalLM(config).to(torch.bfloat16)
    reference.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    model = open_model(tmp_path)
    assert (len({info.file for info in model.tensors.values()}) > 1) == (max_shard_size == "16KB")
    assert (model.shape.dtype, model.shape.head_dim, model.shape.tie_embeddings) == ("bfloat16", 8, tied)
    assert model.shape.rope_theta == reference.model.rotary_emb.config.rope_parameters["rope_theta"]
    state: dict[str, Any] = reference.state_dict()
    for name in expected_tensors(model.shape):
        rows = model.read_rows(name, 0, model.tensors[name].shape[0])
        np.testing.assert_array_equal(rows, state[name].float().numpy(), err_msg=name)


@pytest.mark.sweep
def test_the_default_gguf_as_transformers_reads_it() -> None:
    from transformers import AutoModelForCausalLM

    path = default_model_path()
    model = open_model(path)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    state: dict[str, Any] = reference.state_dict()
    for name in expected_tensors(model.shape):
        rows = model.read_rows(name, 0, model.tensors[name].shape[0])
        np.testing.assert_array_equal(rows, state[name].numpy(), err_msg=name)
    assert reference.config.rope_parameters["rope_theta"] == model.shape.rope_theta
    assert reference.config.rms_norm_eps == pytest.approx(model.shape.rms_norm_eps)
