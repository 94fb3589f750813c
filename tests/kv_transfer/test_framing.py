"""Frames are valid messages of the protocol, and no damaged one is taken for another."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.framing import Corrupted, Frame, Header, Stream, decode, frame_bytes
from tests.kv_transfer.cluster import encode

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(Header, st.builds(Stream, U64, U32, U64, U64, U32, U32, U32, U32), U32, U32, U32)


@given(HEADERS, st.binary(max_size=300))
def test_a_frame_is_the_protocols_message(header: Header, payload: bytes) -> None:
    frame = encode(header, payload)
    message = pb.FetchResponse.FromString(frame)
    assert message.payload == payload
    for name, value in (*header.stream._asdict().items(), ("message", header.message), ("num_rows", header.num_rows)):
        assert getattr(message.header, name) == value
    assert message.header.crc32c == header.crc(payload)
    taken = decode(frame)
    taken.check()
    assert (taken.header, bytes(taken.payload)) == (header, payload)


def test_known_checksum() -> None:
    """CRC32C of 32 zeros after the header's fields, all zero: 120 zeros in all."""
    crc = 0xFFFFFFFF
    for _ in range(88 + 32):
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    header = Header(Stream(0, 0, 0, 0, 0, 0, 0, 0), 0, 0, 0)
    assert header.crc(np.zeros(32, np.uint8)) == crc ^ 0xFFFFFFFF


def test_checksums_are_computed_by_compiled_code() -> None:
    """The library falls back to Python without a word, some hundred times slower."""
    assert google_crc32c.implementation == "c"


@pytest.mark.parametrize("size", [0, 1, 200, 20_000])
def test_every_flipped_bit_is_noticed(size: int) -> None:
    frame = encode(Header(Stream(1, 2, 3, 4, 5, 6, 7, 8), 9, 10, 11), bytes(range(256)) * (size // 256) + bytes(size % 256))
    for bit in (*range(min(len(frame), 140) * 8), *range(140 * 8, len(frame) * 8, 1009)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupted):
            decode(bytes(damaged)).check()


def test_every_cut_is_noticed() -> None:
    frame = encode(Header(Stream(1, 2, 3, 4, 5, 6, 7, 8), 9, 10, 11), bytes(300))
    for end in range(len(frame)):
        with pytest.raises(Corrupted):
            decode(frame[:end])
    with pytest.raises(Corrupted, match="a payload of 300 bytes, 301 have come"):
        decode(frame + b"x")


def test_a_length_without_an_end() -> None:
    frame = encode(Header(Stream(1, 2, 3, 4, 5, 6, 7, 8), 9, 10, 11), b"")
    with pytest.raises(Corrupted, match="a length that does not end"):
        decode(frame[:-1] + b"\xff" * 9)


def test_a_field_that_is_left_out_makes_another_message() -> None:
    """Whoever leaves out what is 0, as other writers of the protocol may, is not understood: every field has its place."""
    frame = encode(Header(Stream(0, 2, 3, 4, 5, 6, 7, 8), 9, 10, 11), b"payload")
    whole = pb.FetchResponse.FromString(frame)
    assert len(whole.SerializeToString()) < len(frame)
    with pytest.raises(Corrupted, match="a frame is a header and a payload"):
        decode(whole.SerializeToString())


def test_the_payload_is_not_copied() -> None:
    frame = encode(Header(Stream(1, 2, 3, 4, 5, 6, 7, 8), 9, 10, 11), bytes(300))
    taken: Frame = decode(frame)
    assert np.shares_memory(taken.payload, np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 1 << 20])
def test_what_a_frame_weighs_is_what_the_protocols_message_weighs(size: int) -> None:
    fields = {field.name: 1 for field in pb.FetchHeader.DESCRIPTOR.fields}
    whole = pb.FetchResponse(header=pb.FetchHeader(**fields), payload=bytes(size))
    assert frame_bytes(size) == whole.ByteSize()
