"""The collective groups of one rank: the backend that opens them, and those that are open."""

from collections.abc import Callable, Mapping, Sequence

from cp_wire.errors import ConfigRefused
from rank_server.collectives.base import Backend, Group
from rank_server.collectives.solo import SoloGroup
from rank_server.place import Place
from rank_server.sequences import PlanRefused


class Groups:
    """backends: implementations by name."""

    def __init__(self, backends: Mapping[str, Callable[[], Backend]]) -> None:
        self._backends = backends
        self._backend: Backend | None = None
        self._is_alone = False
        self._open: dict[str, Group] = {}

    def choose(self, name: str, place: Place) -> None:
        """From now on this backend opens groups, or none for a rank that is a set of its own: what it never uses need not be
        installed. `ConfigRefused` for an unknown one, and one that can't be had here."""
        if name not in self._backends:
            raise ConfigRefused(f"collectives {name!r} is not one of {', '.join(self._backends)}")
        self._backend, self._is_alone = None, place.grid.ranks_per_dp == 1
        if self._is_alone:
            return
        try:
            self._backend = self._backends[name]()
        except ValueError as error:
            raise ConfigRefused(str(error)) from error

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """Bootstrap bytes for a group of which this rank is member 0."""
        return self._require_backend().prepare(name, ranks)

    def join(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> None:
        """Opens a group, in which this one is `rank`; waits for its members."""
        if name in self._open:
            raise PlanRefused(f"group {name} is open already")
        self._open[name] = self._require_backend().open(name, ranks, rank, bootstrap, timeout_s)

    def named(self, name: str) -> Group:
        """An open group; `PlanRefused` when it isn't."""
        if name not in self._open:
            raise PlanRefused(f"group {name} is not open")
        return self._open[name]

    def of(self, kind: str, place: Place) -> Group:
        """The group of a kind that a place is in, see `Place.group_name`; `PlanRefused` when it has other members and isn't
        open."""
        grid = place.grid
        size = {"tp": grid.tp, "q": grid.dcp_in_tp, "dcp": grid.dcp, "pcp": grid.pcp, "wide": grid.ranks_per_dp}[kind]
        name = place.group_name(kind)
        if size == 1:
            return SoloGroup(name)
        if name not in self._open:
            raise PlanRefused(f"group {name} of {size} ranks is not open")
        return self._open[name]

    def set_timeout(self, timeout_s: float) -> None:
        """For every collective from now on, until another one is set."""
        for group in self._open.values():
            group.set_timeout(timeout_s)

    @property
    def exchanged(self) -> tuple[int, float]:
        """Collectives of the open groups so far, and the seconds spent in them."""
        groups = self._open.values()
        return sum(group.calls for group in groups), sum(group.seconds for group in groups)

    def close(self) -> None:
        """Leaves all groups without waiting for anybody; may be called from another thread to interrupt a collective."""
        for group in list(self._open.values()):
            group.close()

    def forget(self) -> None:
        """Leaves all groups; their names are free again."""
        self.close()
        self._open.clear()

    def _require_backend(self) -> Backend:
        if self._backend is None:
            raise PlanRefused("the rank is alone in its set" if self._is_alone else "the rank is not configured yet")
        return self._backend
