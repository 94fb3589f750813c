"""One message of a transfer as bytes: a valid `FetchResponse` whose payload neither end copies more than it must.

protobuf would copy a payload into the message, and again into the frame, and the same on the way back. Here rows are read
straight into the frame; the receiver parses the header and looks at the payload where it is.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.fresh_bytes import filled

FETCH = "/kvloom.v1.KvTransferService/Fetch"
"""The method whose responses are frames."""

Buffer = bytes | memoryview
Bytes = NDArray[np.uint8]

_HEADER_TAG = 0x0A
_PAYLOAD_TAG = 0x12
_CHECKED = struct.Struct("<11Q")
_CRC = struct.Struct("<BI")
_CRC_TAG = pb.FetchHeader.DESCRIPTOR.fields_by_name["crc32c"].number << 3 | 5
"""Its field is the last one and of fixed size, also when it is 0: so all that precedes the payload has a size that does not
depend on the payload."""


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


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself; every field is on the wire and under the checksum."""

    stream: "Stream"
    message: int
    first_row: int
    num_rows: int

    def crc(self, payload: Buffer | Bytes) -> int:
        """CRC32C over the header's fields and the payload."""
        fields = _CHECKED.pack(*self.stream, self.message, self.first_row, self.num_rows)
        # The library takes no memoryview, but an array around the same memory.
        data = np.asarray(payload) if isinstance(payload, memoryview) else payload
        return int(google_crc32c.extend(google_crc32c.value(fields), data))


@dataclass(frozen=True, slots=True)
class Frame:
    """A received message whose CRC is still to be checked. payload: a view into the frame."""

    header: Header
    crc: int
    payload: memoryview

    def check(self) -> None:
        """`Corrupted` when payload or header are not what was sent."""
        if self.header.crc(self.payload) != self.crc:
            raise Corrupted(f"message {self.header.message} has a wrong checksum")


def encode(header: Header, size: int, fill: Callable[[Bytes], None]) -> bytes:
    """The frame with a payload of `size` bytes, which `fill` writes to the array that it is given; raises what that raises."""
    fields = pb.FetchHeader(
        **header.stream._asdict(), message=header.message, first_row=header.first_row, num_rows=header.num_rows
    ).SerializeToString()
    before = _length(_HEADER_TAG, len(fields) + _CRC.size) + fields
    between = _length(_PAYLOAD_TAG, size)
    at = len(before) + _CRC.size + len(between)

    def write(frame: Bytes) -> None:
        payload = frame[at:]
        fill(payload)
        start = before + _CRC.pack(_CRC_TAG, header.crc(payload)) + between
        frame[:at] = np.frombuffer(start, np.uint8)

    return filled(at + size, write)


def decode(frame: bytes) -> Frame:
    """Takes a frame apart; `Corrupted` when it is none, or has anything but a header and a payload."""
    view = memoryview(frame)
    fields, rest = _field(view, _HEADER_TAG)
    payload, rest = _field(rest, _PAYLOAD_TAG)
    if len(rest):
        raise Corrupted(f"{len(rest)} bytes after the payload")
    try:
        header = pb.FetchHeader.FromString(bytes(fields))
    except DecodeError as error:
        raise Corrupted("the header is none") from error
    stream = Stream(*(getattr(header, field) for field in Stream._fields))
    return Frame(Header(stream, header.message, header.first_row, header.num_rows), header.crc32c, payload)


def _length(tag: int, size: int) -> bytes:
    """Tag and length of a field, the length as a base-128 varint."""
    out = bytearray([tag])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _field(view: memoryview, tag: int) -> tuple[memoryview, memoryview]:
    """Content of the length-delimited field that begins here, and what follows it."""
    if not len(view) or view[0] != tag:
        raise Corrupted("a frame is a header and a payload, in this order")
    size = 0
    for at in range(1, min(len(view), 6)):
        size |= (view[at] & 0x7F) << 7 * (at - 1)
        if view[at] < 0x80:
            if len(view) < at + 1 + size:
                raise Corrupted(f"a field of {size} bytes is cut off after {len(view) - at - 1}")
            return view[at + 1 : at + 1 + size], view[at + 1 + size :]
    raise Corrupted("a length that does not end")
