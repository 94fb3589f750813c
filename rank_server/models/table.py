"""Architecture name → model class.

A relative of Llama is one row of `model_files.families`; a model of another build is one file and one row here.
"""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape
from model_files import ModelFiles, ModelRefused
from model_files.families import FAMILIES
from rank_server.collectives.base import Group
from rank_server.models import weights as weight_files
from rank_server.models.decoder import DecoderModel, SplitGroups
from rank_server.models.resident import DecoderWeights

MODELS: Mapping[str, type[DecoderModel]] = dict.fromkeys(FAMILIES, DecoderModel)


def load_weights(
    files: ModelFiles, tp: int, index: int, dtype: torch.dtype, progress: weight_files.Progress, device: torch.device
) -> dict[str, Tensor]:
    """`weights.load_weights` for a model that `build_model` can build; `ModelRefused` names any other architecture."""
    _model_class(files.shape)
    return weight_files.load_weights(files, tp, index, dtype, progress, device)


def resident_weights(shape: ModelShape, weights: MutableMapping[str, Tensor], num_parts: int) -> DecoderWeights:
    """The loaded weights in the order in which passes read them, cut for passes that so many replicas share; empties
    `weights`."""
    _model_class(shape)
    return DecoderWeights.of(shape, weights, num_parts)


def build_model(shape: ModelShape, weights: DecoderWeights, tp_group: Group, split: SplitGroups | None = None) -> DecoderModel:
    """The member's model over its resident weights; cheap, so that it can follow every change of groups."""
    return _model_class(shape)(shape, weights, tp_group, split)


def _model_class(shape: ModelShape) -> type[DecoderModel]:
    model = MODELS.get(shape.architecture)
    if model is None:
        raise ModelRefused(f"architecture {shape.architecture} is not supported, only {', '.join(MODELS)}")
    return model
