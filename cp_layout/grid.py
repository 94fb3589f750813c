"""The rank grid (slow → fast: DP × PCP × TP) and the groups on it."""

from dataclasses import dataclass
from math import isqrt

from cp_layout.errors import LayoutError


def divisors(number: int) -> list[int]:
    """Of a number ≥ 1, ascending."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def shape_dcp(tp: int, pcp: int) -> list[int]:
    """DCP sizes, ascending, that a grid of this TP and PCP accepts: 1, and PCP·d where d divides TP."""
    return sorted({1, *(pcp * d for d in divisors(tp))})


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
            raise LayoutError(f"dcp {self.dcp} must be 1 or a multiple of pcp {self.pcp} (dcp = pcp·d{self._legal_dcp})")
        if self.tp % self.dcp_in_tp != 0:
            raise LayoutError(
                f"tp {self.tp} must be a multiple of d = {self.dcp_in_tp}, the part of dcp {self.dcp} inside a TP group"
                f" (d = dcp / pcp {self.pcp}{self._legal_dcp})"
            )

    @property
    def _legal_dcp(self) -> str:
        return f"; legal dcp here, KV heads aside: {', '.join(map(str, shape_dcp(self.tp, self.pcp)))}"

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

    def wide_groups(self) -> list[list[int]]:
        """All ranks of a DP index as one group, PCP fastest, then TP: member t·pcp + p cuts what TP member t holds further."""
        return [[self.rank(d, p, t) for t in range(self.tp) for p in range(self.pcp)] for d in range(self.dp)]

    def named_groups(self) -> dict[str, tuple[int, ...]]:
        """All groups by name, those of one rank included: `tp:K`, `q:K`, `dcp:K`, `pcp:K`, `wide:K`; ranks in group order.

        K counts over the whole grid. A PCP or wide group that another group equals, member by member, goes by that one's name
        alone. Who opens groups opens them in this order.
        """
        named: dict[str, tuple[int, ...]] = {}
        for kind, groups in self._groups_by_kind().items():
            taken = set(named.values()) if kind in ("pcp", "wide") else set()
            named |= {f"{kind}:{k}": tuple(ranks) for k, ranks in enumerate(groups) if tuple(ranks) not in taken}
        return named

    def group_name(self, kind: str, rank: int) -> str:
        """Name of the group of a kind (`tp`, `q`, `dcp`, `pcp`, `wide`) the rank is in; `LayoutError` when there is none."""
        mine = next((tuple(ranks) for ranks in self._groups_by_kind().get(kind, []) if rank in ranks), None)
        if mine is None:
            raise LayoutError(f"rank {rank} is in no {kind} group")
        names = [name for name, ranks in self.named_groups().items() if ranks == mine]
        return next((name for name in names if name.startswith(f"{kind}:")), names[0])

    def _groups_by_kind(self) -> dict[str, list[list[int]]]:
        return {
            "tp": self.tp_groups(),
            "q": self.q_groups(),
            "dcp": self.dcp_groups(),
            "pcp": self.pcp_groups(),
            "wide": self.wide_groups(),
        }

    def dcp_member(self, rank: int) -> int:
        """Index of the rank in its DCP group: (t mod d)·PCP + p, and 0 when dcp = 1."""
        if self.dcp == 1:
            return 0
        place = self.coords(rank)
        return place.tp % self.dcp_in_tp * self.pcp + place.pcp
