"""Whole numbers on a command line."""

import argparse
from collections.abc import Callable

_UINT32_MAX = 2**32 - 1


def integer(minimum: int, maximum: int = _UINT32_MAX) -> Callable[[str], int]:
    """Parser of a whole number in [minimum, maximum]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is outside [{minimum}, {maximum}]")
        return value

    return parse
