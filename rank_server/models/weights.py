"""Reads the weights that one rank holds: its part of every tensor, in the compute dtype, stacked as `sharding` says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from model_files import ModelFiles, ModelRefused
from rank_server.huge_pages import host_zeros
from rank_server.models.sharding import ResidentTensor, TensorPart, resident_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes in memory so far, bytes in memory at the end)."""

ALIGNMENT = 64
"""Of each tensor in bytes: a cache line."""

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
    weights = _allocate(residents, dtypes, device)
    for resident in residents:
        target = weights[resident.name]
        for block in _blocks(files, resident):
            filled, target = target[: len(block)], target[len(block) :]
            filled.copy_(block)
            done += filled.nbytes
            progress(done, total)
    return weights


def _allocate(
    residents: Sequence[ResidentTensor], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Uninitialised tensors by resident name; on the host all in one piece of memory, side by side."""
    if device.type != "cpu":
        return {each.name: torch.empty(each.dims, dtype=dtypes[each.name], device=device) for each in residents}
    sizes = [each.num_elements * dtypes[each.name].itemsize for each in residents]
    starts = list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
    memory = host_zeros(starts[-1])
    return {
        each.name: memory[start : start + size].view(dtypes[each.name]).view(each.dims)
        for each, start, size in zip(residents, starts, sizes, strict=False)
    }


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
