"""Reads the slice of the weights that one rank holds."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model_files import ModelFiles
from rank_server.models.sharding import part_of

Progress = Callable[[int, int], None]


class WeightError(ValueError):
    """A tensor is missing or has the wrong shape."""


def load_weights(
    files: ModelFiles, tp: int, index: int, dtype: torch.dtype, progress: Progress
) -> Mapping[str, Tensor]:
    total = sum(info.shape[0] * (info.shape[1] if len(info.shape) > 1 else 1) for info in files.tensors.values())
    done = 0
    weights = {}
    for name, info in files.tensors.items():
        rows, columns = part_of(name, info.shape, files.shape, tp, index)
        array = torch.from_numpy(files.read_rows(name, *rows))
        if columns is not None:
            array = array[:, columns[0] : columns[1]]
        weights[name] = array.to(dtype).contiguous()
        done += info.shape[0] * (info.shape[1] if len(info.shape) > 1 else 1)
        progress(done, total)
    return weights
