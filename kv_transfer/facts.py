"""The handshake: what two ends of a transfer have to agree on, and where they may differ."""

import sys
from dataclasses import dataclass

from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.reshard import Side
from cp_wire.errors import ConfigRefused
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import kv_transfer_pb2 as pb
from kv_transfer.store import Geometry

AXIS_ORDER = "plane,token,head,dim"
"""How a payload walks through the cache; blocks are no axis of it."""

MAX_RANKS = 4096
"""Ranks of the other side of a transfer; a plan is worked out for all of them."""

EQUAL = ("protocol_version", "model_hash", "dtype", "planes", "kv_heads", "head_bytes", "axis_order", "byte_order")
"""Fields of `KvFacts` that differ between no two ends; layout and rank may."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its side, with shard offset 0, its rank inside the DP index, its process and its host."""

    side: Side
    rank: int
    instance: str
    host: str


def facts_of(place: Place, geometry: Geometry, model_hash: str, dtype: str) -> pb.KvFacts:
    """What the rank says of itself; `ConfigRefused` when its pool does not hold what its place says."""
    heads = len(place.side.heads_of(place.rank))
    for name, pool, asked in (
        ("heads", geometry.heads, heads),
        ("block size", geometry.block_size, place.side.layout.block_size),
    ):
        if pool != asked:
            raise ConfigRefused(f"the KV pool has {name} {pool}, the layout of rank {place.rank} {asked}")
    return pb.KvFacts(
        protocol_version=PROTOCOL_VERSION,
        model_hash=model_hash,
        dtype=dtype,
        planes=geometry.planes,
        kv_heads=place.side.kv_heads or 0,
        head_bytes=geometry.head_bytes,
        axis_order=AXIS_ORDER,
        byte_order=sys.byteorder,
        side=side_message(place.side),
        rank=place.rank,
        instance=place.instance,
        host=place.host,
    )


def require_equal(own: pb.KvFacts, peer: pb.KvFacts) -> None:
    """`ConfigRefused` when the ends are not of one model, dtype and protocol; names the first field that differs."""
    for field in EQUAL:
        ours, theirs = getattr(own, field), getattr(peer, field)
        if ours != theirs:
            raise ConfigRefused(f"KV cannot move between these ranks: {field} is {ours!r} here and {theirs!r} there")


def require_place(side: Side, rank: int, instance: str, peer: pb.KvFacts) -> None:
    """`ConfigRefused` when a source is not what the plan takes it for; names the first field that differs."""
    if peer.instance != instance:
        raise ConfigRefused(f"instance is {peer.instance!r}, the transfer was planned with {instance!r}: it has restarted")
    if peer.rank != rank:
        raise ConfigRefused(f"rank is {peer.rank}, the transfer was planned with {rank}")
    planned = side_message(side)
    for field in ("tp", "pcp", "dcp", "interleave", "block_size"):
        wanted, found = getattr(planned, field), getattr(peer.side, field)
        if wanted != found:
            raise ConfigRefused(f"{field} is {found} on rank {rank}, the transfer was planned with {wanted}")


def side_message(side: Side) -> pb.KvSide:
    """A side on the wire; the heads travel in `KvFacts`."""
    grid, layout = side.grid, side.layout
    return pb.KvSide(
        tp=grid.tp,
        pcp=grid.pcp,
        dcp=grid.dcp,
        interleave=layout.interleave,
        block_size=layout.block_size,
        shard_offset=side.shard_offset,
    )


def side_of(message: pb.KvSide, kv_heads: int | None) -> Side:
    """The side that a message describes; `ConfigRefused` when it breaks a law."""
    if message.tp * message.pcp > MAX_RANKS:
        raise ConfigRefused(f"a side of {message.tp * message.pcp} ranks is more than the limit of {MAX_RANKS}")
    try:
        grid = Grid(message.tp, message.pcp, message.dcp)
        layout = Layout(message.dcp, message.interleave, message.block_size)
        return Side(grid, layout, kv_heads, message.shard_offset)
    except LayoutError as refusal:
        raise ConfigRefused(f"the layout of the other side: {refusal}") from refusal
