"""Which scheduling sets, pool members and collective groups a rank grid has."""

from dataclasses import dataclass

from cp_layout.grid import Grid

MIXED = "mixed"
"""Role of a set that computes prompts and outputs."""
PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SchedulingSet:
    """One DP index of a side: the ranks that run the same steps, with one scheduler, one epoch and one pool per member."""

    index: int
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    members: tuple[int, ...]
    """Pool member of each rank, in the order of `ranks`; ranks with equal members hold the same block ids."""
    groups: dict[str, tuple[int, ...]]
    """Collective groups of more than one rank, by name (see `Grid.named_groups`), global ranks in group order."""
    role: str = MIXED
    first_rank: int = 0
    """Global rank that the grid counts from."""
    replica_group: str | None = None
    """Name of a group over whose members replicas exchange rows or keys, one of several alike; None where there is no other."""

    @property
    def name(self) -> str:
        """What logs and tasks call it."""
        return f"set {self.index}" if self.role == MIXED else f"{self.role} set {self.index}"

    def member_of(self, rank: int) -> int:
        """Pool member of a rank of this set; `ValueError` for a rank of another set."""
        return self.members[self.ranks.index(rank)]


def scheduling_sets(grid: Grid, role: str = MIXED, first_rank: int = 0) -> tuple[SchedulingSet, ...]:
    """The sets of a grid that counts from `first_rank`, by DP index."""
    named = {name: ranks for name, ranks in grid.named_groups().items() if len(ranks) > 1}
    sets = []
    for index in range(grid.dp):
        ranks = tuple(rank for rank in range(grid.world_size) if grid.coords(rank).dp == index)
        sets.append(
            SchedulingSet(
                index=index,
                ranks=tuple(first_rank + rank for rank in ranks),
                members=tuple(grid.dcp_member(rank) for rank in ranks),
                groups={name: tuple(first_rank + rank for rank in group) for name, group in named.items() if group[0] in ranks},
                role=role,
                first_rank=first_rank,
                replica_group=None if grid.pcp == 1 else grid.group_name("dcp" if grid.dcp > 1 else "pcp", ranks[0]),
            )
        )
    return tuple(sets)
