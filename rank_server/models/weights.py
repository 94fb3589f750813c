"""Reads the weights that one rank holds: its part of every tensor, in the compute dtype, stacked as `sharding` says."""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from model_files import ModelFiles, ModelRefused
from rank_server.models.sharding import ResidentTensor, TensorPart, resident_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes in memory so far, bytes in memory at the end)."""

READ_BYTES = 16 << 20
"""Bound on the float32 rows that are in memory beside the result; at least one row is read at a time."""


class WeightError(ModelRefused):
    """A tensor is missing, has the wrong shape or can't be read; the message names it and its file."""


def load_weights(
    files: ModelFiles, tp: int, index: int, dtype: torch.dtype, progress: Progress, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of TP member `index` of `tp` by resident name, row-major, each allocated once on `device` in its final dtype.

    Only the member's rows are read, and of matrices that are cut by columns (o_proj, down_proj) only its columns, to the
    page of the file and to the quantisation block. Peak memory is the result plus `READ_BYTES`. Raises `WeightError`.
    """
    residents = resident_tensors(files.shape, tp, index)
    for resident in residents:
        for part in resident.parts:
            _check(files, part)
    dtypes = {resident.name: torch.float32 if resident.full_precision else dtype for resident in residents}
    total = sum(resident.num_elements * dtypes[resident.name].itemsize for resident in residents)
    done = 0
    weights: dict[str, Tensor] = {}
    for resident in residents:
        weights[resident.name] = target = torch.empty(resident.dims, dtype=dtypes[resident.name], device=device)
        for block in _blocks(files, resident):
            filled, target = target[: len(block)], target[len(block) :]
            filled.copy_(block)
            done += filled.nbytes
            progress(done, total)
    return weights


def _check(files: ModelFiles, part: TensorPart) -> None:
    info = files.tensors.get(part.name)
    if info is None:
        raise WeightError(f"{files.path}: tensor {part.name} of shape {list(part.shape)} is missing")
    if tuple(info.shape) != part.shape:
        raise WeightError(f"{info.file}: tensor {part.name} has shape {list(info.shape)}, the model needs {list(part.shape)}")


def _blocks(files: ModelFiles, resident: ResidentTensor) -> Iterator[Tensor]:
    """The rows of a resident tensor from top to bottom as float32, few at a time."""
    for part in resident.parts:
        row_bytes = max(4, 4 * prod(part.dims[1:]))
        step = max(1, READ_BYTES // row_bytes)
        for start in range(*part.rows, step):
            stop = min(start + step, part.rows[1])
            try:
                rows = torch.from_numpy(files.read_rows(part.name, start, stop, part.columns))
            except (OSError, ValueError) as error:
                file = files.tensors[part.name].file
                raise WeightError(f"{file}: rows {start}..{stop} of tensor {part.name} can't be read ({error})") from error
            yield rows
