"""The house: who may import whom, stubs that match their sources, one place for channels, a whole package list."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cp_wire.generate import generate
from cp_wire.lint import lint

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
TOP_LEVEL = sorted({package.partition(".")[0] for package in PACKAGES})


def sources(*roots):
    return [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]


def run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arrows_point_down():
    run(TOOLS / "lint-imports", "--no-cache")


def test_protos_are_well_formed(tmp_path):
    assert lint() == 0
    source = (ROOT / "protos/common.proto").read_text()
    (tmp_path / "common.proto").write_text(source.replace("MERGE_UNSPECIFIED = 0", "NO_MERGE = 0"))
    assert lint(tmp_path) != 0


def test_stubs_are_fresh(tmp_path):
    fresh = generate(tmp_path)
    checked_in = sorted((ROOT / "cp_wire/pb").glob("*_pb2*.py*"))
    assert [path.name for path in fresh] == [path.name for path in checked_in]
    for new, old in zip(fresh, checked_in, strict=True):
        assert new.read_bytes() == old.read_bytes(), f"{old.name} is stale: run `python -m cp_wire.generate`"


def test_every_package_is_installed():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in TOP_LEVEL for path in (ROOT / package).rglob("__init__.py")
    }
    assert found == set(PACKAGES)


@pytest.mark.parametrize("path", sources(*TOP_LEVEL, "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_k2_channels_and_servers_come_from_one_factory(path):
    if path == ROOT / "cp_wire/channels.py":
        return
    made = re.compile(r"^(insecure_channel|secure_channel|server)$")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and made.match(node.attr):
            base = ast.unparse(node.value)
            assert base not in ("grpc", "grpc.aio", "aio"), f"{path.name}:{node.lineno} makes a channel of its own"


@pytest.mark.parametrize("path", sources(*TOP_LEVEL), ids=lambda path: str(path.relative_to(ROOT)))
def test_k1_nothing_forks(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            assert used not in ("os.fork", "os.system", "os.popen") and node.value.id != "multiprocessing", (
                f"{path}:{node.lineno}"
            )
        if isinstance(node, ast.keyword):
            assert node.arg not in ("preexec_fn", "start_new_session"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", sources(*TOP_LEVEL), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executable_is_read(path):
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"eval", "exec"}
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not imports & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


@pytest.mark.parametrize(
    ("package", "homes"),
    [("cupy", {"rank_server/collectives/nccl.py"}), ("triton", {"rank_server/attention/triton_decode.py"})],
)
def test_what_only_gpu_hosts_have_is_imported_in_one_file(package, homes):
    """And there only when it is used: importing all packages must not need it."""
    importers = set()
    for path in sources(*TOP_LEVEL):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == package for name in names):
                importers.add(str(path.relative_to(ROOT)))
    assert importers == homes
    block = f"import sys; sys.modules[{package!r}] = None; import rank_server.__main__"
    run(sys.executable, "-c", block)
