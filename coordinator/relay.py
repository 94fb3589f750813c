"""How the engines of two sets hand one request over: what they tell whoever leads it from one to the other."""

from typing import TYPE_CHECKING, Protocol

from coordinator.scheduler_types import Progress
from cp_wire.errors import KvloomError

if TYPE_CHECKING:
    from coordinator.text_rows import LiveRequest


class Relay(Protocol):
    """Called by engines, on the event loop, in the order in which things happen."""

    @property
    def live(self) -> "LiveRequest":
        """The request as its client knows it."""
        ...

    @property
    def scores_prompt(self) -> bool:
        """Whether the client is to hear prompt scores from the prompt's set: not once the output's set goes on with them."""
        ...

    @property
    def prefill_ranks(self) -> tuple[int, ...]:
        """Global ranks that computed the prompt, or its first part."""
        ...

    @property
    def route_reason(self) -> str:
        """Why it went the way it went."""
        ...

    def computed(self, tokens: int) -> None:
        """The prompt's set has committed so many tokens; the prompt goes on."""
        ...

    def prefilled(self, progress: Progress) -> Progress | None:
        """The prompt's set is done with the request; returns what the client is to hear of it."""
        ...

    def lost(self, error: KvloomError) -> None:
        """The prompt's set is gone."""
        ...

    def leave(self) -> None:
        """The output's set has let go of the request."""
        ...

    def ended(self) -> None:
        """The client has all it will get."""
        ...
