"""Prints the dependencies that pyproject.toml in the working directory declares: `python requirements.py [EXTRA…]`.

An image layer made from this list stays valid while only the sources change.
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The requirements of the package and of its named extras, in the order of the file; KeyError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
