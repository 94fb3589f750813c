"""The README tells the truth: its commands parse, those without a cluster run, its shapes are legal."""

import re
import shlex
from pathlib import Path

import pytest

from cp_client.bench_command import BENCHMARKS
from cp_client.cli import build_parser, main
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.laws import check_heads

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
COMMANDS = re.findall(r"^\.venv/bin/kvloom (.*)$", SHELL, re.MULTILINE)
TARGETS = set(re.findall(r"\bmake ([a-z]+)", README))
SHAPES = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", README, re.MULTILINE)


def test_there_is_something_to_check():
    assert len(COMMANDS) >= 7
    assert len(SHAPES) >= 7
    assert {"demo", "test", "up", "lint", "sweep", "bench"} <= TARGETS


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses_and_runs_without_a_cluster(line, capsys):
    words = shlex.split(line)
    build_parser(words[0]).parse_args(words)
    if words[0] in ("explain", "check"):
        assert main(words) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "Makefile", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])
def test_a_benchmark_exists_that_a_page_names(page):
    text = (ROOT / page).read_text()
    names = set(re.findall(r"kvloom bench ([a-z][a-z-]*)", text)) | set(re.findall(r"-m benchmarks\.([a-z_]+)", text))
    assert names or page not in ("Makefile", "docs/benchmarks.md")
    assert {name.replace("_", "-") for name in names} <= set(BENCHMARKS)


@pytest.mark.parametrize(("tp", "pcp", "dcp", "ranks", "shards", "legal"), SHAPES)
def test_a_shape_of_the_table(tp, pcp, dcp, ranks, shards, legal):
    grid = Grid(tp=int(tp), pcp=int(pcp), dcp=int(dcp))
    assert (grid.world_size, grid.dcp) == (int(ranks), int(shards))
    if legal.startswith("every model"):
        for kv_heads in range(1, 9):
            check_heads(grid, 8 * kv_heads, kv_heads)
        return
    kv_heads = int(re.search(r"(\d+) KV head", legal).group(1))
    heads = re.search(r"(\d+) Q heads", legal)
    check_heads(grid, int(heads.group(1)) if heads else 8 * kv_heads, kv_heads)
    if grid.dcp_in_tp > 1:
        with pytest.raises(LayoutError):
            check_heads(grid, 8 * 4 * kv_heads, 4 * kv_heads)


def test_the_repository_is_listed_whole():
    table = README.partition("## Layout of the repository")[2]
    listed = set(re.findall(r"`(\w+)/`", table))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"protos", "docs", "deploy"} == listed


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists()
