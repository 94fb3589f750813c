"""One message of a transfer as bytes: a valid `FetchResponse` whose payload neither end copies more than it must.

protobuf would copy a payload into the message, and again into the frame, and the same on the way back. Here rows are read
straight into the frame; the receiver takes the header apart and looks at the payload where it is.

All fields of a header are there, in the order of their numbers and also those that are 0, and each is of fixed size: so what
precedes the payload is of the same size, with the same tags, in every frame.
"""

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.fresh_bytes import filled

FETCH = "/kvloom.v1.KvTransferService/Fetch"
"""The method whose responses are frames."""

Bytes = NDArray[np.uint8]

_FIELDS = sorted(pb.FetchHeader.DESCRIPTOR.fields, key=lambda field: field.number)
_WIDE = [field.type == field.TYPE_FIXED64 for field in _FIELDS]
_TAGS = tuple(field.number << 3 | (1 if wide else 5) for field, wide in zip(_FIELDS, _WIDE, strict=True))
_HEADER = struct.Struct("<" + "".join("BQ" if wide else "BI" for wide in _WIDE))
"""Tag and value of each field; the checksum is the last one."""
_BEFORE = bytes((0x0A, _HEADER.size))
"""Tag and length of the header."""
_PAYLOAD_TAG = bytes((0x12,))
_LENGTH_AT = len(_BEFORE) + _HEADER.size + 1
_CHECKED = struct.Struct("<11Q")


class Corrupted(ValueError):
    """Bytes that are not what their sender sent."""


class Stream(NamedTuple):
    """What all messages of one fetch have in common: the identity of the blocks, both ranks and the tokens. A message under
    any other is of another time or for somebody else."""

    session: int
    attempt: int
    epoch: int
    generation: int
    source_rank: int
    target_rank: int
    start: int
    end: int


class Header(NamedTuple):
    """What a message says of itself; every field is on the wire and under the checksum."""

    stream: Stream
    message: int
    first_row: int
    num_rows: int

    def crc(self, payload: Bytes) -> int:
        """CRC32C over the header's fields and the payload."""
        stream, message, first_row, num_rows = self
        fields = _CHECKED.pack(*stream, message, first_row, num_rows)
        return int(google_crc32c.extend(google_crc32c.value(fields), payload))

    def tagged(self, crc: int) -> bytes:
        """All that precedes the length of the payload."""
        stream, message, first_row, num_rows = self
        fields = list(_TAGS) * 2
        fields[::2] = _TAGS
        fields[1::2] = (*stream[:4], message, first_row, num_rows, *stream[4:], crc)
        return _BEFORE + _HEADER.pack(*fields) + _PAYLOAD_TAG


class Frame(NamedTuple):
    """A received message whose CRC is still to be checked. payload: a view into the frame."""

    header: Header
    crc: int
    payload: Bytes

    def check(self) -> None:
        """`Corrupted` when payload or header are not what was sent."""
        if self.header.crc(self.payload) != self.crc:
            raise Corrupted(f"message {self.header.message} has a wrong checksum")


def encode(header: Header, size: int, fill: Callable[[Bytes], None]) -> bytes:
    """The frame with a payload of `size` bytes, which `fill` writes to the array that it is given; raises what that raises."""
    total = frame_bytes(size)
    at = total - size

    def write(frame: Bytes) -> None:
        payload = frame[at:]
        fill(payload)
        frame[:at] = np.frombuffer(header.tagged(header.crc(payload)) + _varint(size), np.uint8)

    return filled(total, write)


def frame_bytes(size: int) -> int:
    """Bytes of the frame of a payload of `size` bytes: those of the serialised `FetchResponse`."""
    return _LENGTH_AT + len(_varint(size)) + size


def decode(frame: bytes) -> Frame:
    """Takes a frame apart; `Corrupted` when it is none, or has anything but a header and a payload."""
    if len(frame) <= _LENGTH_AT or not frame.startswith(_BEFORE) or frame[_LENGTH_AT - 1 : _LENGTH_AT] != _PAYLOAD_TAG:
        raise Corrupted("a frame is a header and a payload, in this order")
    fields = _HEADER.unpack_from(frame, len(_BEFORE))
    if fields[::2] != _TAGS:
        raise Corrupted("the header is none")
    values = fields[1::2]
    stream = Stream(*values[:4], *values[7:11])
    header = Header(stream, *values[4:7])
    return Frame(header, values[11], np.frombuffer(frame, np.uint8)[_payload_at(frame) :])


def _payload_at(frame: bytes) -> int:
    """Where the payload begins, which ends with the frame."""
    size = 0
    for shift, byte in enumerate(frame[_LENGTH_AT : _LENGTH_AT + 5]):
        size |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            at = _LENGTH_AT + shift + 1
            if at + size != len(frame):
                raise Corrupted(f"a payload of {size} bytes, {len(frame) - at} have come")
            return at
    raise Corrupted("a length that does not end")


@lru_cache(maxsize=8)
def _varint(size: int) -> bytes:
    """A length, seven bits a byte."""
    out = bytearray()
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)
