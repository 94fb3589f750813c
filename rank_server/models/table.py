"""Architecture name → model class.

A relative of Llama is one row of `model_files.families`; a model of another build is one file and one row here.
"""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from cp_layout.model_shape import ModelShape
from model_files import ModelFiles, ModelRefused
from model_files.families import FAMILIES, MLA_FAMILIES
from rank_server.attention.latent import UpProjection
from rank_server.collectives.base import Group
from rank_server.models import weights as weight_files
from rank_server.models.decoder import DecoderModel, SplitGroups
from rank_server.models.mla import MlaModel
from rank_server.models.mla_weights import MlaWeights
from rank_server.models.operations import operations_for
from rank_server.models.resident import DecoderWeights

Model = DecoderModel | MlaModel
Weights = DecoderWeights | MlaWeights

MODELS: Mapping[str, tuple[type[Weights], type[Model]]] = {
    **dict.fromkeys(FAMILIES, (DecoderWeights, DecoderModel)),
    **dict.fromkeys(MLA_FAMILIES, (MlaWeights, MlaModel)),
}


def load_weights(
    files: ModelFiles, tp: int, index: int, dtype: torch.dtype, progress: weight_files.Progress, device: torch.device
) -> dict[str, Tensor]:
    """`weights.load_weights` for a model that `build_model` can build; `ModelRefused` names any other architecture."""
    _classes(files.shape)
    return weight_files.load_weights(files, tp, index, dtype, progress, device)


def resident_weights(shape: ModelShape, weights: MutableMapping[str, Tensor], num_parts: int) -> Weights:
    """The loaded weights in the order in which passes read them, cut for passes that so many replicas share; empties
    `weights`. What passes compile is compiled."""
    resident = _classes(shape)[0].of(shape, weights, num_parts)
    operations_for(resident.embedding.device, resident.dtype).warm_up(shape.rms_norm_eps, shape.qk_norm)
    return resident


def build_model(shape: ModelShape, weights: Weights, tp_group: Group, split: SplitGroups | None = None) -> Model:
    """The member's model over its resident weights; cheap, so that it can follow every change of groups."""
    _, model = _classes(shape)
    return model(shape, weights, tp_group, split)  # type: ignore[arg-type]  # a row of the table holds what fits together


def up_projections(weights: Weights) -> tuple[UpProjection, ...]:
    """What makes keys and values of latents, by layer; nothing where there are no latents."""
    return tuple(layer.up for layer in weights.layers) if isinstance(weights, MlaWeights) else ()


def _classes(shape: ModelShape) -> tuple[type[Weights], type[Model]]:
    classes = MODELS.get(shape.architecture)
    if classes is None:
        raise ModelRefused(f"architecture {shape.architecture} is not supported, only {', '.join(MODELS)}")
    return classes
