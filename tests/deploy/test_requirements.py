"""What the control image installs is enough for the coordinator, and torch is not in it."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.deploy.dockerfile import ROOT

ONLY = """
import sys

allowed = set(%s) | sys.stdlib_module_names

class Only:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)

sys.meta_path.insert(0, Only())
"""
CONTROL = ("coordinator", "cp_client", "cp_layout", "cp_wire", "kv_transfer", "model_files")


def requirements(*extras):
    command = [sys.executable, ROOT / "deploy/requirements.py", *extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def closure(lines):
    """Names of all installed distributions that the requirements draw in."""
    pending, found = [(Requirement(line), "") for line in lines], set()
    while pending:
        wanted, extra = pending.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for asked in ("", *wanted.extras):
            key = (wanted.name.lower().replace("_", "-"), asked)
            if key not in found:
                found.add(key)
                pending += [(Requirement(line), asked) for line in metadata.requires(wanted.name) or []]
    return {name for name, _ in found}


def confined(code):
    """Runs code in a Python that sees the standard library, the control image's distributions and our own packages."""
    distributions = closure(requirements().stdout.splitlines())
    modules = [
        module
        for module, owners in metadata.packages_distributions().items()
        if distributions & {owner.lower().replace("_", "-") for owner in owners}
    ]
    source = ONLY % json.dumps([*modules, *CONTROL]) + code
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_extras_are_added():
    plain, rank, gpu = (requirements(*extras).stdout.splitlines() for extras in ((), ("rank",), ("rank", "gpu")))
    assert plain == rank[: len(plain)] and rank == gpu[: len(rank)]
    assert any(line.startswith("torch") for line in rank[len(plain) :])
    assert any(line.startswith("cupy") for line in gpu[len(rank) :])


def test_an_unknown_extra_fails_the_build():
    done = requirements("rnak")
    assert done.returncode != 0 and done.stdout == ""


def test_no_torch_behind_any_corner():
    assert not closure(requirements().stdout.splitlines()) & {"torch", "transformers", "cupy-cuda13x"}


@pytest.mark.parametrize(
    "command",
    [
        "import coordinator.__main__ as it; it.build_parser().parse_args(['--model', 'm'])",
        "import cp_wire.healthcheck as it; it.build_parser().parse_args(['h:1'])",
        "import cp_client.cli as it; assert it.main(['explain', 'groups', '--tp', '2', '--pcp', '1', '--dcp', '1']) == 0",
    ],
)
def test_the_control_image_is_enough_for(command):
    done = confined(f"{command}; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_confinement_holds():
    done = confined("import rank_server.__main__")
    assert done.returncode != 0 and "rank_server is not in this image" in done.stderr
    assert confined("import torch").returncode != 0
