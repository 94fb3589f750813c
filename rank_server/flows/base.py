"""How a step's rows meet the keys."""

from typing import Protocol

from torch import Tensor


class Flow(Protocol):
    """One step's way from this rank's new queries, keys and values to its attention output.

    Made anew for each step from the plan and the rank's place. All ranks of a set run the same collectives, however many rows
    each of them computes.
    """

    def attend(self, layer: int, q: Tensor, *rows: Tensor) -> Tensor:
        """q [T, hq, dq] of the T tokens that this rank computes, and their K and V [T, hk, D] each → [T, hq, dv] in q's dtype.

        With latent attention the one latent [T, 1, dc + dr] stands for K and V.
        Afterwards the keys and values of all the step's tokens are in the caches that hold them.
        """
        ...


class Way(Protocol):
    """What one kind of a step's rows goes through when each row is computed by one replica."""

    def complete(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q [r, hq, D] and KV rows [r, s, D] (see `ShardAttention`) of the r rows of a kind here → [r, hq, E] in q's dtype."""
        ...
