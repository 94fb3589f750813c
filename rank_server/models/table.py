"""Architecture name → model class."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape
from rank_server.collectives.base import Group
from rank_server.models.llama import LlamaModel
from rank_server.models.weights import load_weights

__all__ = ["build_model", "load_weights"]


def build_model(shape: ModelShape, weights: Mapping[str, Tensor], tp_group: Group, dtype: torch.dtype) -> LlamaModel:
    return LlamaModel(shape, weights, tp_group, dtype)
