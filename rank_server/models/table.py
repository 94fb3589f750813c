"""Architecture name → model class: a further model is one file and one row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape
from model_files import ModelFiles, ModelRefused
from rank_server.collectives.base import Group
from rank_server.models import weights as weight_files
from rank_server.models.llama import LlamaModel

MODELS: Mapping[str, type[LlamaModel]] = {"LlamaForCausalLM": LlamaModel}


def load_weights(
    files: ModelFiles, tp: int, index: int, dtype: torch.dtype, progress: weight_files.Progress
) -> dict[str, Tensor]:
    """`weights.load_weights` for a model that `build_model` can build; `ModelRefused` names any other architecture."""
    _model_class(files.shape)
    return weight_files.load_weights(files, tp, index, dtype, progress)


def build_model(shape: ModelShape, weights: Mapping[str, Tensor], tp_group: Group, dtype: torch.dtype) -> LlamaModel:
    """The member's model over its loaded weights; cheap, so that it can follow every change of groups."""
    return _model_class(shape)(shape, weights, tp_group, dtype)


def _model_class(shape: ModelShape) -> type[LlamaModel]:
    model = MODELS.get(shape.architecture)
    if model is None:
        raise ModelRefused(f"architecture {shape.architecture} is not supported, only {', '.join(MODELS)}")
    return model
