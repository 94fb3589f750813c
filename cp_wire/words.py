"""Numbers in sentences and tables for people."""

_MOST_DIGITS = 6


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`: for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(share: float, digits: int = 1) -> str:
    """A share, 0 … 1, as `12.5%`; with more digits where it would look like all or nothing and is neither, up to six."""
    text = f"{share:.{digits}%}"
    while 0 < share < 1 and digits < _MOST_DIGITS and float(text[:-1]) in (0, 100):
        digits += 1
        text = f"{share:.{digits}%}"
    return text
