"""The argument parser of every command: it refuses in one sentence."""

import argparse
from typing import ClassVar, NoReturn

REFUSED = 2
"""Exit status of a refusal, as argparse has it."""


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are one line on stderr that starts with `prefix`."""

    prefix: ClassVar[str] = "kvloom"

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(REFUSED, f"{self.prefix}: {' '.join(message.split())} (see {self.prog} --help)\n")


class ProcessParser(CommandParser):
    """For the processes of a cluster: their last words on stderr are `fatal: MESSAGE`, which the launcher reports."""

    prefix: ClassVar[str] = "fatal"
