"""Tensor index of safetensors files from their headers alone: 8 bytes of length, then JSON (the format's own layout)."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from model_files.errors import ModelRefused
from model_files.fields import parse_json_object, read_json_object

STORED_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
"""Dtype as stored → (name of the dtype, bytes per element)."""

MAX_HEADER_BYTES = 100_000_000
"""The bound that the format itself sets."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a header describes it; `begin` is its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * STORED_DTYPES[self.dtype][1]


def stored_tensors(directory: Path) -> list[StoredTensor]:
    """All tensors of a checkpoint directory, single-file or sharded with an index.

    `ModelRefused` when there is no checkpoint, a shard is missing, truncated or damaged, or the index and the shards
    disagree.
    """
    if (directory / INDEX).is_file():
        return _sharded(directory)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    shards = sorted(directory.glob("model-*-of-*.safetensors"))
    if not shards:
        raise ModelRefused(f"{directory}: neither {SINGLE} nor {INDEX} is there")
    raise ModelRefused(f"{directory}: {len(shards)} shards but no {INDEX}")


def read_header(path: Path) -> list[StoredTensor]:
    """Tensors of one file; every byte range must have the size its shape says and lie inside the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise ModelRefused(f"{path}: not a whole safetensors file ({size} bytes, header says {length})")
        header = parse_json_object(file.read(length), path)
    tensors = [_entry(name, entry, path, 8 + length, size) for name, entry in header.items() if name != "__metadata__"]
    _check_disjoint(tensors, path)
    return tensors


def _check_disjoint(tensors: list[StoredTensor], path: Path) -> None:
    """Two tensors that share bytes are a damaged header, not two tensors."""
    in_order = sorted((tensor for tensor in tensors if tensor.nbytes), key=lambda tensor: tensor.begin)
    for before, after in pairwise(in_order):
        if before.begin + before.nbytes > after.begin:
            raise ModelRefused(f"{path}: tensors {before.name} and {after.name} overlap")


def _entry(name: str, entry: Any, path: Path, data_start: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(dim, int) and dim >= 0 for dim in dims
        ):
            pass
        case _:
            raise ModelRefused(f"{path}: the header's entry for {name} is damaged")
    if dtype not in STORED_DTYPES:
        raise ModelRefused(f"{path}: tensor {name} has dtype {dtype}, only {', '.join(STORED_DTYPES)} are supported")
    needed = math.prod(dims) * STORED_DTYPES[dtype][1]
    if not 0 <= begin <= end:
        raise ModelRefused(f"{path}: tensor {name} has the byte range {begin} to {end}")
    if end - begin != needed:
        raise ModelRefused(f"{path}: tensor {name} of shape {dims} needs {needed} bytes, the header gives it {end - begin}")
    if data_start + end > size:
        raise ModelRefused(f"{path}: truncated, tensor {name} ends at byte {data_start + end} of {size}")
    return StoredTensor(name, dtype, tuple(dims), path, data_start + begin)


def _sharded(directory: Path) -> list[StoredTensor]:
    index = directory / INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelRefused(f"{index}: weight_map is missing or damaged")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelRefused(f"{index}: shard {shard!r} is not a plain file name")
        if not (directory / shard).is_file():
            raise ModelRefused(f"{directory / shard}: shard named by {INDEX} is missing")
        tensors |= {tensor.name: tensor for tensor in read_header(directory / shard) if weight_map.get(tensor.name) == shard}
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ModelRefused(f"{directory / shard}: tensor {name} is missing, {INDEX} says it is there")
    return list(tensors.values())
