"""What can go wrong with a rank."""

import re

from cp_wire.errors import ConfigRefused, Internal, KvloomError

COLLECTIVE_FAILED = "COLLECTIVE_FAILED"
"""Reason of a rank that waited in vain for another one: it need not be the one to blame."""

_WORD = re.compile(r"[A-Z][A-Z_]{0,63}")

REFUSALS = ("CONFIG_REFUSED", "POOL_REFUSED", "MODEL_REFUSED")
"""Reasons of a rank that can't work as it was told to: nothing but another configuration helps."""


class RankFault(Exception):
    """Something a rank did or failed to do.

    `str()` names the rank and says `what` in words of ours: it is fit for clients. `detail` is for the log and the operators'
    status: it may repeat what the rank said, with addresses and paths.
    """

    def __init__(self, rank: int, what: str, detail: str = "") -> None:
        super().__init__(f"rank {rank}: {what}")
        self.rank, self.what = rank, what
        self.detail = detail or what


class LaneClosed(RankFault):
    """The lane ended before the answer came."""


class CommandFailed(RankFault):
    """The rank answered an operation ("step", "open_group dcp:0") with an error; `reason` is its stable word."""

    def __init__(self, rank: int, operation: str, reason: str, message: str) -> None:
        self.reason = reason if _WORD.fullmatch(reason) else "INTERNAL"
        super().__init__(rank, f"{self.reason} in {operation}", f"{reason}: {message}")


class CommandTimedOut(RankFault):
    """No answer within the deadline."""


class BadAnswer(RankFault):
    """The rank's answer contradicts the command."""


class TextStuck(Internal):
    """The thread that turns tokens into text does not come back from a step's."""


class StartFailed(Internal):
    """The cluster could not start; ends the process with the message as its last line."""


def start_failure(what: str, fault: BaseException | None) -> KvloomError:
    """Why a cluster could not start, as the exit status needs it: a refusal if that is what the rank's answer was."""
    refused = isinstance(fault, CommandFailed) and fault.reason in REFUSALS
    return ConfigRefused(what) if refused else StartFailed(what)
