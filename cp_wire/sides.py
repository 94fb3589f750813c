"""The sides of a cluster: ranks that share a shape and a role."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_wire.effective import grid_of, layout_of
from cp_wire.flags import cluster_config_from
from cp_wire.pb import common_pb2
from cp_wire.side_flags import MIXED, naming, sides_of

Settle = Callable[[common_pb2.ClusterConfig], common_pb2.ClusterConfig]


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks [first_rank, first_rank + number of ranks of its grid), all of one configuration. config: settled."""

    config: common_pb2.ClusterConfig
    role: str = MIXED
    """prefill, decode, or mixed in a cluster of one side."""
    first_rank: int = 0

    @property
    def grid(self) -> Grid:
        """Its ranks, counted from `first_rank`."""
        return grid_of(self.config)

    @property
    def layout(self) -> Layout:
        """The KV layout of its requests."""
        return layout_of(self.config)


def sides_from(args: Namespace, settled: Settle) -> tuple[Side, ...]:
    """The sides that the flags ask for, prefill first; raises LayoutError, and what `settled` raises.

    args: of `flags.add_cluster_flags`. settled: makes a whole configuration of what was asked for.
    """

    def config(role: str, side: Namespace) -> common_pb2.ClusterConfig:
        with naming(role):
            return settled(cluster_config_from(side))

    return in_order({role: config(role, side) for role, side in sides_of(args).items()})


def in_order(configs: Mapping[str, common_pb2.ClusterConfig]) -> tuple[Side, ...]:
    """Sides whose ranks follow one another."""
    sides: list[Side] = []
    first = 0
    for role, config in configs.items():
        sides.append(Side(config, role, first))
        first += sides[-1].grid.world_size
    return tuple(sides)
