"""A Hugging Face directory: config.json, safetensors, tokenizer.json and their companions."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from model_files.errors import ModelRefused
from model_files.fields import MAX_JSON_BYTES, Fields, read_json_object
from model_files.hf_config import shape_from_config
from model_files.model import ModelFiles
from model_files.safetensors_index import STORED_DTYPES, StoredTensor, stored_tensors
from model_files.tensors import TensorInfo, select_tensors

_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class HfModel(ModelFiles):
    """Checkpoint in Hugging Face layout."""

    kind = "hf"

    stored: Mapping[str, StoredTensor]
    tokenizer_config: Mapping[str, Any]

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        texts = {}
        for role in _SPECIAL_ROLES:
            token = self.tokenizer_config.get(role)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[role] = text
        return texts

    @cached_property
    def add_bos(self) -> bool:
        """As tokenizer_config.json says; where it is silent, what the tokenizer's own post-processor does."""
        stated = self.tokenizer_config.get("add_bos_token")
        if self.bos_token_id is None:
            return False
        return stated if isinstance(stated, bool) else self.tokenizer().encode("").ids[:1] == [self.bos_token_id]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(f"{path}: no such file, text needs it")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelRefused(f"{path}: not a tokenizer ({error})") from error
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= self.shape.vocab_size:
            raise ModelRefused(f"{path}: token id {largest} is outside the model's vocabulary of {self.shape.vocab_size}")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def read_rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        tensor = self._checked_rows(name, start, stop, columns)
        stored = self.stored[name]
        row_shape = tensor.shape[1:]
        width = int(np.prod(row_shape, dtype=np.int64))
        named, size = STORED_DTYPES[stored.dtype]
        dtype = np.dtype("<u2") if named == "bfloat16" else np.dtype(named).newbyteorder("<")
        begin, count = stored.begin + start * width * size, (stop - start) * width
        if columns is None or columns == (0, width):
            raw = np.fromfile(stored.file, dtype, count, offset=begin).reshape(stop - start, *row_shape)
        else:
            raw = _columns(stored.file, dtype, begin, (stop - start, width), columns)
        # bfloat16 is the upper half of a float32.
        return (raw.astype(np.uint32) << 16).view(np.float32) if named == "bfloat16" else raw.astype(np.float32)


def _columns(file: Path, dtype: np.dtype, begin: int, shape: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
    """A range of columns of the matrix that begins at byte `begin`: no page without any of them is read."""
    first, last = columns
    if 0 in shape or first == last:
        return np.empty((shape[0], last - first), dtype)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)  # reading ahead would bring in the columns between
        matrix = np.frombuffer(mapped, dtype, shape[0] * shape[1], begin).reshape(shape)
        part = matrix[:, first:last].copy()
        del matrix  # a view would keep the map from closing
    return part


def open_hf(directory: Path) -> HfModel:
    """Open and check a directory; `ModelRefused` when it is not a whole checkpoint of a supported model."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ModelRefused(f"{config_path}: no such file, a model directory has one")
    config = read_json_object(config_path)
    stored = {tensor.name: tensor for tensor in stored_tensors(directory)}
    embedding = stored.get("model.embed_tokens.weight")
    shape = shape_from_config(config, config_path, STORED_DTYPES[embedding.dtype][0] if embedding else None)
    found = [TensorInfo(t.name, t.shape, t.dtype, t.file, t.name) for t in stored.values()]
    generation = _optional_json(directory / "generation_config.json")
    tokenizer_config = _optional_json(directory / "tokenizer_config.json")
    fields = Fields(config, config_path)
    stops = Fields(generation, directory / "generation_config.json").token_ids("eos_token_id", shape.vocab_size)
    return HfModel(
        path=directory,
        name=directory.resolve().name,
        shape=shape,
        eos_token_ids=stops or fields.token_ids("eos_token_id", shape.vocab_size),
        bos_token_id=fields.token_id("bos_token_id", shape.vocab_size),
        chat_template=_chat_template(directory, tokenizer_config),
        tensors=select_tensors(found, shape, directory),
        stored=stored,
        tokenizer_config=tokenizer_config,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja if there, else tokenizer_config.json's: one text, or the one named `default` of several."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelRefused(f"{path}: {path.stat().st_size} bytes, the limit is {MAX_JSON_BYTES}")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{path}: not UTF-8 at byte {error.start}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
