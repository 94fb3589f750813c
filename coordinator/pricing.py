"""What work costs this set of ranks, as far as its links and its steps have told."""

from coordinator.choice import Choice, Prices, work_of
from coordinator.plan import ScheduledStep
from cp_layout.cost import CostModel, Rates
from cp_layout.rates import Link, refined, with_link


class Pricing:
    """Prices that follow measurements. Outlives the epochs of a set."""

    def __init__(self, model: CostModel, rates: Rates = Rates()) -> None:  # noqa: B008 - immutable
        self._model = model
        self._rates = rates
        self.link: Link | None = None
        """As measured when the groups were opened; None before that, and where nothing is exchanged between replicas."""

    @property
    def prices(self) -> Prices:
        """As of now."""
        return Prices(self._model, self._rates)

    def take_link(self, link: Link) -> None:
        """Takes in what the exchanges of a group have shown."""
        self.link = link
        self._rates = with_link(self._rates, link)

    def observe(self, step: ScheduledStep, rank_s: float) -> None:
        """Takes in what the slowest rank needed for a step; one without rows says nothing."""
        if step.rows:
            choice = Choice(step.decode_mode, step.gather, step.cost_version)
            self._rates = refined(self._rates, work_of(choice, step.facts, self._model), rank_s)
