"""What can go wrong with a rank."""

from cp_wire.errors import Internal


class RankFault(Exception):
    """Something a rank did or failed to do; `str()` names the rank and is fit for clients: no addresses, no paths."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank}: {what}")
        self.rank, self.what = rank, what


class LaneClosed(RankFault):
    """The lane ended before the answer came."""


class CommandFailed(RankFault):
    """The rank answered with an error; `reason` is its stable upper-case word."""

    def __init__(self, rank: int, reason: str, message: str) -> None:
        super().__init__(rank, f"{reason}: {message}")
        self.reason = reason


class CommandTimedOut(RankFault):
    """No answer within the deadline."""


class BadAnswer(RankFault):
    """The rank's answer contradicts the command."""


class StartFailed(Internal):
    """The cluster could not start; ends the process with the message as its last line."""
