"""docs/layout.md is made of facts: every command, drawing and table in it is recomputed here."""

import argparse
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from cp_client.check import add_check_parser
from cp_client.explain import add_explain_parser
from cp_layout.blocks import BlockHasher, reusable_tokens
from cp_layout.capacity import blocks_by_member, roomiest_offset
from cp_layout.cuts import cut
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_layout.interleave import Layout
from cp_layout.laws import check_heads

PAGE = (Path(__file__).parents[2] / "docs" / "layout.md").read_text(encoding="utf-8")


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    found = []
    for fence in fences("console"):
        for entry in re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]:
            command, output = entry.split("\n", 1)
            found.append((command, output))
    return found


def table(*header: str) -> list[list[str]]:
    """Rows of the one table with this header."""
    lines = PAGE.splitlines()
    start = lines.index("| " + " | ".join(header) + " |")
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def draw(layout: Layout, length: int) -> str:
    """Blocks of every shard as rows of the positions in their slots."""
    columns, b = layout.virtual_blocks(length), layout.block_size
    lines = [("        " + "".join(f"  column {c}".ljust(3 * b + 3) for c in range(columns))).rstrip()]
    for shard in range(layout.num_shards):
        slots = layout.slots(shard, np.arange(columns), np.arange(length))
        holder = {int(slot): str(position) for position, slot in enumerate(slots) if slot >= 0}
        blocks = ["".join(f"{holder.get(slot, '·'):>3}" for slot in range(c * b, (c + 1) * b)) for c in range(columns)]
        lines.append(f"shard {shard} |" + "".join(f"{block} |" for block in blocks))
    return "\n".join(lines) + "\n"


def integers(cells: str) -> list[int]:
    return [int(cell) for cell in cells.split()]


def test_no_fence_escapes_the_checks() -> None:
    assert PAGE.count("```") == 2 * sum(len(fences(kind)) for kind in ("console", "text", "mermaid"))
    assert len(commands()) == PAGE.count("\n$ kvloom ")
    assert len(fences("mermaid")) == 1


@pytest.mark.parametrize(("command", "expected"), commands(), ids=lambda text: text if text.startswith("kvloom ") else "")
def test_commands_answer_as_printed(command: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="kvloom")
    subparsers = parser.add_subparsers(required=True)
    add_explain_parser(subparsers)
    add_check_parser(subparsers)
    args = parser.parse_args(shlex.split(command)[1:])
    status = args.func(args)
    out, err = capsys.readouterr()
    if expected.startswith("{"):
        assert (status, err) == (0, "")
        assert json.loads(out) == json.loads(expected)
    else:
        assert status == (2 if expected.startswith("kvloom: ") else 0)
        assert out + err == expected


def test_drawings() -> None:
    drawings = re.findall(
        r"^<!-- drawing N=(\d+) I=(\d+) B=(\d+) L=(\d+) -->\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert len(drawings) == len(fences("text")) == 2
    for n, i, b, length, text in drawings:
        assert text == draw(Layout(int(n), int(i), int(b)), int(length))


def test_order_of_the_pictured_group() -> None:
    (picture,) = fences("mermaid")
    assert [int(rank) for rank in re.findall(r"r(\d)(?= --|$)", picture.splitlines()[-1])] == Grid(2, 2, 4).dcp_groups()[0]
    replicas = re.findall(r"subgraph.*?end", picture, re.DOTALL)
    assert [integers(" ".join(re.findall(r"rank (\d)", replica))) for replica in replicas] == Grid(2, 2, 4).tp_groups()


def test_offsets() -> None:
    for n, b, length, free, offset, blocks in table("N", "I = B", "L", "free blocks by member", "offset", "blocks by member"):
        layout = Layout(int(n), int(b), int(b))
        assert roomiest_offset(layout, int(length), integers(free)) == int(offset)
        assert blocks_by_member(layout, int(length), int(offset)) == integers(blocks)


def test_hash_units() -> None:
    for n, i, b, unit, units in table("N", "I", "B", "tokens of a unit", "units in a virtual block"):
        hasher = BlockHasher(Layout(int(n), int(i), int(b)), b"", b"")
        assert (hasher.unit_tokens, hasher.units_per_virtual_block) == (int(unit), int(units))


def test_reusable_tokens() -> None:
    for n, b, prompt, reusable in table("N", "B", "prompt tokens", "reusable at most"):
        assert reusable_tokens(int(prompt), Layout(int(n), int(b), int(b))) == int(reusable)


def test_legal_shapes() -> None:
    for tp, pcp, dcp, kv_heads, verdict, _ in table("tp", "pcp", "dcp", "KV heads", "verdict", "because"):
        grid = Grid(int(tp), int(pcp), int(dcp))
        try:
            check_heads(grid, grid.tp * int(kv_heads), int(kv_heads))
        except LayoutError:
            assert verdict == "refused"
        else:
            assert verdict == "legal"


def test_cuts() -> None:
    for size, parts, widths in table("F", "T", "widths of the parts"):
        ranges = [cut(int(size), int(parts), index) for index in range(int(parts))]
        assert [last - first for first, last in ranges] == integers(widths)
