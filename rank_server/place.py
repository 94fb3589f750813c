"""Where a rank stands and what it computes with: everything that follows from the configuration alone."""

from dataclasses import dataclass
from typing import Literal

import torch

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_config
from cp_layout.model_shape import ModelShape
from cp_wire.effective import grid_of, layout_of
from cp_wire.errors import ConfigRefused
from cp_wire.identity import PROTOCOL_VERSION
from cp_wire.pb import common_pb2
from cp_wire.words import counted
from rank_server.device import claim

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

Merge = Literal["a2a", "ag_rs"]
MERGES: "dict[common_pb2.Merge.ValueType, Merge]" = {common_pb2.MERGE_A2A: "a2a", common_pb2.MERGE_AG_RS: "ag_rs"}

NOT_OURS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "pcp_gather",
    "mla_gather",
    "model_name",
    "kv_cache_tokens_per_rank",
    "kv_cache_memory_bytes",
)
"""Settings that bind the coordinator alone; of the pool, a rank is told the number of blocks."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank works with; `taken_over` says it in the terms of the configuration it came from."""

    rank: int
    """Global."""
    first_rank: int
    """Global rank that the grid counts from."""
    grid: Grid
    layout: Layout
    member: int
    tp_index: int
    pcp_index: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    merge: Merge
    device: torch.device

    @classmethod
    def of(cls, config: common_pb2.ClusterConfig, rank: int, shape: ModelShape, first_rank: int = 0) -> "Place":
        """Derives the place of a global rank; raises `LayoutError` for a broken law, `ConfigRefused` for what is not here."""
        grid, layout = grid_of(config), layout_of(config)
        on_grid = rank - first_rank
        if not 0 <= on_grid < grid.world_size:
            behind = f" from rank {first_rank} on" if first_rank else ""
            raise ConfigRefused(f"rank {rank} does not exist in a world of {counted(grid.world_size, 'rank')}{behind}")
        for name in ("dtype", "kv_cache_dtype"):
            if getattr(config, name) not in DTYPES:
                raise ConfigRefused(f"{name} {getattr(config, name)!r} is not one of {', '.join(DTYPES)}")
        if config.merge not in MERGES:
            raise ConfigRefused(f"merge {config.merge} is not one of {', '.join(MERGES.values())}")
        if config.q_replicate:
            raise ConfigRefused("replicated query projections are not supported")
        check_config(grid, layout, shape.num_heads, shape.num_kv_heads, mla=shape.mla is not None)
        coords = grid.coords(on_grid)
        return cls(
            rank=rank,
            first_rank=first_rank,
            grid=grid,
            layout=layout,
            member=grid.dcp_member(on_grid),
            tp_index=coords.tp,
            pcp_index=coords.pcp,
            dtype=DTYPES[config.dtype],
            kv_dtype=DTYPES[config.kv_cache_dtype],
            merge=MERGES[config.merge],
            device=claim(config.device, rank),
        )

    @property
    def index(self) -> int:
        """The rank inside its DP index."""
        return (self.rank - self.first_rank) % self.grid.ranks_per_dp

    def group_name(self, kind: str) -> str:
        """Name of the rank's group of a kind: "tp", "q", "dcp", "pcp" or "wide"."""
        return self.grid.group_name(kind, self.rank - self.first_rank)

    def taken_over(
        self, asked: common_pb2.ClusterConfig, weights_dtype: torch.dtype, model_hash: str, collectives: str
    ) -> common_pb2.ClusterConfig:
        """The configuration as this rank lives by it, not as it was asked: a field that was misread or ignored differs.

        weights_dtype, model_hash, collectives: of what was really loaded and opened. Only `NOT_OURS` is repeated unread.
        """
        return common_pb2.ClusterConfig(
            tp=self.grid.tp,
            pcp=self.grid.pcp,
            dcp=self.grid.dcp,
            dp=self.grid.dp,
            interleave=self.layout.interleave,
            block_size=self.layout.block_size,
            merge=next(wire for wire, merge in MERGES.items() if merge == self.merge),
            dtype=_name(weights_dtype),
            kv_cache_dtype=_name(self.kv_dtype),
            model_hash=model_hash,
            collectives=collectives,
            device=self.device.type,
            protocol_version=PROTOCOL_VERSION,
            **{name: getattr(asked, name) for name in NOT_OURS},
        )


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)
