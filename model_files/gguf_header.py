"""GGUF header: typed metadata and the tensor table, without decoding arrays that nobody has asked for.

The layout is GGUF's own (versions 2 and 3, little-endian): magic, version, tensor count, metadata count; then key, type,
value for each metadata entry; then name, dimensions, type, offset for each tensor; then, aligned, the tensor data.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from model_files.errors import ModelRefused

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type → struct code."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first: (rows, columns)."""
    type: GGMLQuantizationType
    begin: int
    """First byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of the whole tensor if it is a vector)."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


@dataclass(frozen=True, slots=True)
class _Array:
    """An array left where it lies."""

    position: int
    element: int
    count: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file; `buffer` is the mapped file."""

    path: Path
    buffer: mmap.mmap
    values: Mapping[str, Any]
    """Scalars and strings; arrays are read with `array`."""
    tensors: Mapping[str, GgufTensor]
    _arrays: Mapping[str, _Array]

    def array(self, key: str) -> list[Any]:
        """Elements of an array; empty when the file has none under that key."""
        where = self._arrays.get(key)
        if where is None:
            return []
        cursor = _Cursor(self.path, self.buffer, where.position)
        if where.element == _STRING:
            return [cursor.text() for _ in range(where.count)]
        return list(struct.unpack_from(f"<{where.count}{_SCALARS[where.element]}", self.buffer, where.position))

    def element(self, key: str, index: int) -> str | None:
        """One string of an array of strings, or None when it has no such element."""
        where = self._arrays.get(key)
        if where is None or where.element != _STRING or not 0 <= index < where.count:
            return None
        cursor = _Cursor(self.path, self.buffer, where.position)
        for _ in range(index):
            cursor.skip_text()
        return cursor.text()


class _Cursor:
    """Reads the header forwards; every read is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, position: int) -> None:
        self.path, self.buffer, self.position = path, buffer, position

    def refuse(self, what: str) -> ModelRefused:
        return ModelRefused(f"{self.path}: damaged GGUF header at byte {self.position}, {what}")

    def advance(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        begin, end = self.position, self.position + size
        if end > len(self.buffer):
            raise ModelRefused(f"{self.path}: truncated, the GGUF header reaches byte {end} of {len(self.buffer)}")
        self.position = end
        return begin

    def scalar(self, code: str) -> Any:
        packed = struct.Struct("<" + code)
        return packed.unpack_from(self.buffer, self.advance(packed.size))[0]

    def skip_text(self) -> None:
        self.advance(self.scalar("Q"))

    def text(self) -> str:
        size = self.scalar("Q")
        begin = self.advance(size)
        try:
            return self.buffer[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise self.refuse("a string is not UTF-8") from error

    def array(self) -> _Array:
        element, count = self.scalar("I"), self.scalar("Q")
        where = _Array(self.position, element, count)
        if element == _STRING:
            for _ in range(count):
                self.skip_text()
        elif element in _SCALARS:
            self.advance(count * struct.calcsize("<" + _SCALARS[element]))
        else:
            raise self.refuse(f"arrays of type {element} are unknown")
        return where


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a file's header and check that every tensor lies inside the file; `ModelRefused` when it is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelRefused(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, buffer, len(MAGIC))
    version, tensor_count, value_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in _VERSIONS:
        raise ModelRefused(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    if max(tensor_count, value_count) > _MAX_ENTRIES:
        raise cursor.refuse(f"{tensor_count} tensors and {value_count} settings, the limit is {_MAX_ENTRIES}")
    values, arrays = _metadata(cursor, value_count)
    table = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ModelRefused(f"{path}: general.alignment = {alignment!r} is not a multiple of 8")
    data_start = math.ceil(cursor.position / alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        tensor = _placed(path, size, name, shape, kind, data_start + offset)
        if tensors.setdefault(name, tensor) is not tensor:
            raise ModelRefused(f"{path}: tensor {name} is there twice")
    return GgufHeader(path, buffer, values, tensors, arrays)


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, _Array]]:
    values: dict[str, Any] = {}
    arrays: dict[str, _Array] = {}
    for _ in range(count):
        key, kind = cursor.text(), cursor.scalar("I")
        if key in values or key in arrays:
            raise cursor.refuse(f"setting {key} is there twice")
        if kind == _ARRAY:
            arrays[key] = cursor.array()
        elif kind == _STRING:
            values[key] = cursor.text()
        elif kind in _SCALARS:
            values[key] = cursor.scalar(_SCALARS[kind])
        else:
            raise cursor.refuse(f"setting {key} has unknown type {kind}")
    return values, arrays


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.text(), cursor.scalar("I")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise cursor.refuse(f"tensor {name} has {rank} dimensions")
    # The file lists the fastest dimension first.
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(rank)]))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _placed(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ModelRefused(f"{path}: tensor {name} has unknown quantisation {kind}") from error
    block = GGML_QUANT_SIZES[quantisation][0]
    if shape[-1] % block:
        raise ModelRefused(f"{path}: tensor {name} has rows of {shape[-1]}, {quantisation.name} needs a multiple of {block}")
    tensor = GgufTensor(name, shape, quantisation, begin)
    end = begin + math.prod(shape[:-1]) * tensor.row_bytes
    if end > size:
        raise ModelRefused(f"{path}: truncated, tensor {name} ends at byte {end} of {size}")
    return tensor
