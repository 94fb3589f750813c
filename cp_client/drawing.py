"""Tables on their way to a terminal, a file or a picture."""

import io
from pathlib import Path

from rich.console import Console, Group


def print_table(table: Group) -> None:
    """Print to stdout: coloured in a terminal, plain and never narrower than the table elsewhere."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_width(table))
    console.print(table)


def write_svg(table: Group, path: Path) -> None:
    """Write the table as an SVG picture as wide as it needs to be; raises `OSError`."""
    console = Console(record=True, file=io.StringIO(), width=_width(table), force_terminal=True, color_system="truecolor")
    console.print(table)
    path.write_text(console.export_svg(title="kvloom explain"), encoding="utf-8")


def _width(table: Group) -> int:
    return Console(width=1_000_000, file=io.StringIO()).measure(table).maximum
