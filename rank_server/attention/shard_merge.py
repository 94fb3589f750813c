"""Bringing the partial attention of all shards of a DCP group back to the rank whose heads it is."""

from torch import Tensor

from rank_server.attention.group_merge import MERGES, merge_whole
from rank_server.collectives.base import Group


class ShardMerge:
    """Merges partials over the N members of a DCP group, each of which attended the heads of its whole query group.

    q_group: the d members of one replica that share a DCP group; dcp_group: all N members, index (t mod d)·pcp + p; pcp:
    replicas in the DCP group (1 when N = 1); merge: one of `MERGES`. Which collectives run depends on these alone.

    Raises ValueError when the groups do not fit together and for an unknown merge.
    """

    def __init__(self, q_group: Group, dcp_group: Group, merge: str, pcp: int) -> None:
        d, n = q_group.size, dcp_group.size
        if n != pcp * d or dcp_group.index // pcp != q_group.index:
            raise ValueError(
                f"member {dcp_group.index} of DCP group {dcp_group.name} ({n}) does not fit member {q_group.index} of "
                f"query group {q_group.name} (d = {d}) with pcp = {pcp}: need N = pcp·d, and index // pcp = query index"
            )
        if merge not in MERGES:
            raise ValueError(f"merge {merge!r} is not one of {', '.join(MERGES)}")
        self._dcp_group = dcp_group
        self._d = d
        self._pcp = pcp
        self._merge = MERGES[merge]
        # The heads of a query group of one are what every member of the DCP group wants.
        self._gathers_whole = merge == "a2a" and d == 1

    def __call__(self, out: Tensor, lse: Tensor) -> Tensor:
        """out [T, d·h, D] and lse [T, d·h], fp32, of all heads of the query group → out [T, h, D] of the own ones."""
        if self._dcp_group.size == 1:
            return out
        if self._gathers_whole:
            return merge_whole(self._dcp_group, out, lse)
        return self._merge(self._dcp_group, out, lse, self._chunks)

    def _chunks(self, x: Tensor) -> Tensor:
        """[T, d·h, E] → [N, T, h, E]: member j gets the heads of query member j // pcp."""
        tokens, heads, width = x.shape
        by_member = x.view(tokens, self._d, heads // self._d, width).transpose(0, 1)
        return by_member.unsqueeze(1).expand(-1, self._pcp, -1, -1, -1).flatten(0, 1)
