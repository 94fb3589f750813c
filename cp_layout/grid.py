"""The rank grid (slow → fast: DP × PCP × TP) and the groups on it."""

from dataclasses import dataclass

from cp_layout.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Coords:
    """Place of a rank on the grid."""

    dp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes; world size = dp·pcp·tp. DCP reuses the ranks of PCP and TP.

    Raises `LayoutError` for sizes below 1, and for a DCP that is neither inside a TP group nor 1 nor PCP·d.
    """

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pcp", self.pcp), ("dcp", self.dcp), ("dp", self.dp)):
            if size < 1:
                raise LayoutError(f"{name} must be at least 1, got {size}")
        if self.dcp > 1 and self.dcp % self.pcp != 0:
            raise LayoutError(f"dcp {self.dcp} must be 1 or a multiple of pcp {self.pcp} (dcp = pcp·d)")
        if self.tp % self.dcp_in_tp != 0:
            raise LayoutError(
                f"tp {self.tp} must be a multiple of d = {self.dcp_in_tp}, the part of dcp {self.dcp} inside a TP group"
                f" (d = dcp / pcp {self.pcp})"
            )

    @property
    def dcp_in_tp(self) -> int:
        """d: members of a DCP group that lie in one TP group."""
        return 1 if self.dcp == 1 else self.dcp // self.pcp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pcp * self.tp

    @property
    def ranks_per_dp(self) -> int:
        """Ranks that serve one request at most: pcp·tp."""
        return self.pcp * self.tp

    def coords(self, rank: int) -> Coords:
        """Coordinates of a global rank; `LayoutError` when the grid has no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not on a grid of {self.world_size} ranks")
        return Coords(rank // self.ranks_per_dp, rank // self.tp % self.pcp, rank % self.tp)

    def rank(self, dp: int, pcp: int, tp: int) -> int:
        """Global rank at the coordinates; inverse of `coords`."""
        return (dp * self.pcp + pcp) * self.tp + tp

    def tp_groups(self) -> list[list[int]]:
        """Replicas: runs of consecutive ranks."""
        return [[self.rank(d, p, t) for t in range(self.tp)] for d in range(self.dp) for p in range(self.pcp)]

    def pcp_groups(self) -> list[list[int]]:
        """Ranks with the same TP index."""
        return [[self.rank(d, p, t) for p in range(self.pcp)] for d in range(self.dp) for t in range(self.tp)]

    def dcp_groups(self) -> list[list[int]]:
        """Runs of DCP in the transposed order (PCP fastest, then TP); list order = member index."""
        groups = []
        for d in range(self.dp):
            order = [self.rank(d, p, t) for t in range(self.tp) for p in range(self.pcp)]
            groups += [order[i : i + self.dcp] for i in range(0, len(order), self.dcp)]
        return groups

    def q_groups(self) -> list[list[int]]:
        """The d TP members of one replica that share a DCP group: the ranks among which Q heads are gathered."""
        d = self.dcp_in_tp
        return [group[i : i + d] for group in self.tp_groups() for i in range(0, self.tp, d)]

    def named_groups(self) -> dict[str, tuple[int, ...]]:
        """All TP, Q and DCP groups, those of one rank included, by name: `tp:K`, `q:K`, `dcp:K`; ranks in group order.

        K counts over the whole grid. Who opens groups opens them in this order.
        """
        kinds = {"tp": self.tp_groups(), "q": self.q_groups(), "dcp": self.dcp_groups()}
        return {f"{kind}:{k}": tuple(ranks) for kind, groups in kinds.items() for k, ranks in enumerate(groups)}

    def group_name(self, kind: str, rank: int) -> str:
        """Name of the group of a kind (`tp`, `q` or `dcp`) that the rank is in; `LayoutError` when there is none."""
        for name, ranks in self.named_groups().items():
            if name.startswith(f"{kind}:") and rank in ranks:
                return name
        raise LayoutError(f"rank {rank} is in no {kind} group")

    def dcp_member(self, rank: int) -> int:
        """Index of the rank in its DCP group: (t mod d)·PCP + p, and 0 when dcp = 1."""
        if self.dcp == 1:
            return 0
        place = self.coords(rank)
        return place.tp % self.dcp_in_tp * self.pcp + place.pcp
