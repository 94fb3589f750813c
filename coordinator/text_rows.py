"""A step's tokens become text: the work of the text thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.detokenizer import Detokenizer
from coordinator.request import Request
from coordinator.stream import RequestStream
from cp_wire.logs import get_logger
from cp_wire.pb import common_pb2

if TYPE_CHECKING:
    from coordinator.relay import Relay

log = get_logger("coordinator.text")


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request the engine runs. The detokenizer and `text_ended` belong to the text thread, the rest to the event loop."""

    request: Request
    detokenizer: Detokenizer
    stream: RequestStream = field(default_factory=RequestStream)
    """Shared by the completions of one prompt."""
    index: int = 0
    """Which completion of its prompt it is."""
    committed_end: bool = False
    """The scheduler has ended it; only its last text is still to come."""
    text_ended: bool = False
    prompt_digests: list[bytes] = field(default_factory=list)
    """`Request.digests` of the prompt as the set sees it that computes it, where that is another one than the output's."""
    relay: "Relay | None" = None
    """Who leads it from the one set to the other."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """What one step brought for one request."""

    live: LiveRequest
    token: int | None
    logprobs: common_pb2.PositionLogprobs | None = None
    finished: str | None = None
    """stop, length or error, when the scheduler ended the request with this token."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TextResult:
    """The same, as output for the client."""

    live: LiveRequest
    token_ids: tuple[int, ...]
    text: str
    logprobs: common_pb2.PositionLogprobs | None
    finished: str | None
    """As in the row, or "stop" when a stop string was completed."""
    error: str | None


def to_text(rows: Sequence[TextRow]) -> list[TextResult]:
    """Detokenises all rows of a step. A fault in one row ends that request with an error and no other."""
    return [result for row in rows if (result := _guarded(row)) is not None]


def _guarded(row: TextRow) -> TextResult | None:
    if row.live.text_ended:
        # A stop string ended the request while its next token was being computed.
        return None
    try:
        return _one(row)
    except Exception as error:
        log.error("detokenisation failed", exc=error, request=row.live.request.request_id)
        row.live.text_ended = True
        return TextResult(row.live, (), "", None, "error", f"detokenisation failed ({type(error).__name__})")


def _one(row: TextRow) -> TextResult:
    live, finished, text = row.live, row.finished, ""
    # The token that is itself the stop sign counts as output but shows no text.
    if row.token is not None and finished != "stop":
        emission = live.detokenizer.push((row.token,))
        text = emission.text
        if emission.stopped:
            finished = "stop"
    if finished is not None:
        live.text_ended = True
        text += live.detokenizer.flush()
    return TextResult(live, () if row.token is None else (row.token,), text, row.logprobs, finished, row.error)
