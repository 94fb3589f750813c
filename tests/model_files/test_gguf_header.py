"""Damaged GGUF headers: refused in one sentence, whatever byte is wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from model_files import ModelRefused
from model_files.gguf_header import read_gguf_header
from tests.model_files.tiny_checkpoint import vocabulary, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_agrees_with_the_format_s_own_reader(whole: Path) -> None:
    header, reference = read_gguf_header(whole), GGUFReader(whole)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.values.get(key, header.array(key)) == field.contents(), key
    assert set(header.tensors) == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        mine = header.tensors[tensor.name]
        assert (mine.shape, mine.type, mine.begin) == (tuple(reversed(tensor.shape)), tensor.tensor_type, tensor.data_offset)


def test_single_elements_of_an_array(whole: Path) -> None:
    header = read_gguf_header(whole)
    assert [header.element("tokenizer.ggml.tokens", index) for index in (0, 100, 264)] == [
        vocabulary()[i] for i in (0, 100, 264)
    ]
    assert header.element("tokenizer.ggml.tokens", 265) is None
    assert header.element("tokenizer.ggml.token_type", 0) is None
    assert header.array("absent") == []


def test_truncated_anywhere(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "cut.gguf"
    header_end = min(tensor.begin for tensor in read_gguf_header(whole).tensors.values())
    cuts = {*range(4, header_end, 97), header_end - 1, header_end + 1, len(content) // 2, len(content) - 1}
    for size in cuts:
        path.write_bytes(content[:size])
        assert "truncated" in refusal(path), size


@pytest.mark.parametrize("content", [b"", b"GG", b"ggjt" + bytes(100), b"\x00" * 64])
def test_not_gguf_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    assert "not a GGUF file" in refusal(path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_versions_and_byte_orders_that_are_not_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    assert f"GGUF version {version} is not supported" in refusal(path)


def packed(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("body", "counts", "sentence"),
    [
        (b"", (1 << 40, 0), "1099511627776 tensors and 0 settings"),
        (packed("k") + struct.pack("<I", 99), (0, 1), "setting k has unknown type 99"),
        (packed("k") + struct.pack("<IIQ", 9, 9, 1), (0, 1), "arrays of type 9 are unknown"),
        (packed("k") + struct.pack("<IIQ", 9, 8, 1 << 60), (0, 1), "truncated"),
        (packed("k") + struct.pack("<IIQ", 9, 10, 1 << 61), (0, 1), "truncated"),
        (struct.pack("<Q", 1 << 62), (0, 1), "truncated"),
        (2 * (packed("k") + struct.pack("<II", 4, 1)), (0, 2), "setting k is there twice"),
        (struct.pack("<Q", 2) + b"\xff\xfe", (0, 1), "a string is not UTF-8"),
        (packed("general.alignment") + struct.pack("<II", 4, 0), (0, 1), "general.alignment = 0 is not a multiple of 8"),
        (packed("t") + struct.pack("<I", 5), (1, 0), "tensor t has 5 dimensions"),
        (packed("t") + struct.pack("<IQIQ", 1, 8, 77, 0), (1, 0), "tensor t has unknown quantisation 77"),
        (packed("t") + struct.pack("<IQIQ", 1, 33, 3, 0), (1, 0), "tensor t has rows of 33, Q4_1 needs a multiple of 32"),
        (packed("t") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0), (1, 0), "truncated, tensor t ends at byte"),
        (2 * (packed("t") + struct.pack("<IQIQ", 1, 0, 0, 0)), (2, 0), "tensor t is there twice"),
    ],
)
def test_damaged_headers(tmp_path: Path, body: bytes, counts: tuple[int, int], sentence: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body + bytes(64 if counts[0] else 0))
    assert sentence in refusal(path)


def test_flipped_bytes_never_escape_as_another_error(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "flipped.gguf"
    header_end = min(tensor.begin for tensor in read_gguf_header(whole).tensors.values())
    random = np.random.default_rng(11)
    refused = 0
    for position in random.integers(4, header_end, 400):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            header = read_gguf_header(path)
            for key in header._arrays:
                header.array(key)
        except ModelRefused:
            refused += 1
    assert refused > 50
