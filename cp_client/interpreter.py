"""How this process starts another Python process that runs the same code."""

import os
import site
from collections.abc import Mapping
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
"""Directory that holds the packages this process runs."""


def same_code_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environment` (default: this process's) for a child that imports the packages this process runs and nothing from the
    current directory: `python -m` would otherwise take whatever lies there for a module of the standard library.
    """
    result = dict(os.environ if environment is None else environment)
    result["PYTHONSAFEPATH"] = "1"
    if str(PACKAGE_ROOT) not in _site_directories():  # these are searched anyway, behind the standard library
        given = result.get("PYTHONPATH")
        result["PYTHONPATH"] = str(PACKAGE_ROOT) + (os.pathsep + given if given else "")
    return result


def _site_directories() -> set[str]:
    return {os.path.realpath(path) for path in (*site.getsitepackages(), site.getusersitepackages())}
