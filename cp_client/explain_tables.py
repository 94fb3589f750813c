"""The tables that `kvloom explain` draws from its own JSON; colour repeats what the text says, never more."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cp_wire.words import counted, percent

_SHARD_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


def slots_table(facts: dict[str, Any]) -> Group:
    """One row per position, one column per shard; the owner's slot in the owner's colour."""
    title = (
        f"slots: {counted(facts['cp'], 'shard')}, interleave {facts['interleave']}, block size {facts['block_size']}, "
        f"virtual block {facts['virtual_block_size']}"
    )
    table = _table()
    table.add_column("position", justify="right")
    table.add_column("owner", justify="right")
    for shard in range(facts["cp"]):
        table.add_column(f"shard {shard}", justify="right", header_style=_style(shard))
    for index, (position, owner) in enumerate(zip(facts["positions"], facts["owner"], strict=True)):
        slots = (_slot(shard, row[index]) for shard, row in enumerate(facts["slots"]))
        table.add_row(str(position), Text(str(owner), style=_style(owner)), *slots)
    return Group(Text(title), table)


def lengths_table(facts: dict[str, Any]) -> Group:
    """One row per shard: tokens, blocks, and the fill of its last block as a bar."""
    title = (
        f"lengths: {counted(facts['tokens'], 'token')} over {counted(facts['cp'], 'shard')}, interleave {facts['interleave']}, "
        f"{counted(facts['virtual_blocks'], 'virtual block')} of {facts['cp'] * facts['block_size']}"
    )
    table = _table()
    for header in ("shard", "tokens", "blocks", "unused slots"):
        table.add_column(header, justify="right")
    table.add_column("filled")
    for shard, (tokens, blocks) in enumerate(zip(facts["local_lens"], facts["blocks"], strict=True)):
        room = blocks * facts["block_size"]
        bar = Text(_bar(tokens, room), style=_style(shard))
        table.add_row(Text(str(shard), style=_style(shard)), str(tokens), str(blocks), str(room - tokens), bar)
    return Group(Text(title), table)


def groups_table(facts: dict[str, Any]) -> Group:
    """Every replica as a row of ranks coloured by DCP group, then the groups themselves."""
    group_of = {rank: index for index, group in enumerate(facts["dcp"]) for rank in group}
    title = f"{counted(facts['world_size'], 'rank')}: one row per replica (TP group), colour and suffix = DCP group"
    grid = _table()
    grid.add_column("replica", justify="right")
    for member in range(len(facts["tp"][0])):
        grid.add_column(f"tp {member}", justify="right")
    for replica, ranks in enumerate(facts["tp"]):
        cells = (Text(f"{rank} ·{group_of[rank]}", style=_style(group_of[rank])) for rank in ranks)
        grid.add_row(str(replica), *cells)
    lists = _table()
    lists.add_column("axis")
    lists.add_column("groups, ranks in group order")
    for axis in ("tp", "pcp", "dcp"):
        lists.add_row(axis, Text(" ".join(str(group) for group in facts[axis])))
    return Group(Text(title), grid, lists)


def transfer_table(facts: dict[str, Any]) -> Group:
    """Tokens and runs of every pair of shards, then what each unit of transfer sends."""
    ends = " to ".join("cp {cp}, interleave {interleave}, block {block}".format(**facts[end]) for end in ("from", "to"))
    pairs: dict[tuple[int, int], list[int]] = {}
    for move in facts["moves"]:
        pairs.setdefault((move["src"], move["dst"]), []).append(move["count"])
    moves = _table()
    moves.add_column("from shard", justify="right")
    moves.add_column("to shard", justify="right")
    moves.add_column("tokens", justify="right")
    moves.add_column("runs", justify="right")
    moves.add_column("share")
    for (src, dst), counts in pairs.items():
        bar = Text(_bar(sum(counts), facts["useful_tokens"]), style=_style(dst))
        shards = (Text(str(shard), style=_style(shard)) for shard in (src, dst))
        moves.add_row(*shards, str(sum(counts)), str(len(counts)), bar)
    units = _table()
    units.add_column("unit")
    units.add_column("tokens sent", justify="right")
    units.add_column("waste", justify="right")
    units.add_column("of it useful")
    for name, sent in (
        ("whole virtual blocks", facts["virtual_block_granular"]),
        ("whole blocks", facts["block_granular"]),
        ("tokens", facts),
    ):
        bar = Text(_bar(facts["useful_tokens"], sent["sent_tokens"]), style="green")
        units.add_row(name, str(sent["sent_tokens"]), percent(sent["waste"]), bar)
    return Group(Text(f"transfer of {counted(facts['useful_tokens'], 'token')}: {ends}"), moves, units)


def zigzag_table(facts: dict[str, Any]) -> Group:
    """One row per request with its tokens as a bar in the colours of their members, then one row per member."""
    tokens, of, over = (sum(facts["lengths"]), "token"), (len(facts["lengths"]), "request"), (len(facts["ranks"]), "member")
    title = f"zigzag: {counted(*tokens)} of {counted(*of)} over {counted(*over)}"
    requests = _table()
    for header in ("request", "computed", "new"):
        requests.add_column(header, justify="right")
    requests.add_column("members, by position")
    pieces = [(row["request"], row["start"], row["length"], m) for m, rank in enumerate(facts["ranks"]) for row in rank["rows"]]
    for request, (computed, length) in enumerate(zip(facts["computed"], facts["lengths"], strict=True)):
        bar = Text()
        for _, start, count, member in sorted(piece for piece in pieces if piece[0] == request):
            begin, end = (_REQUEST_WIDTH * (at - computed) // length for at in (start, start + count))
            bar.append(str(member).ljust(max(end - begin, len(str(member)) + 1), "━"), style=_style(member))
        requests.add_row(str(request), str(computed), str(length), bar)
    members = _table()
    for header in ("member", "tokens", "pairs"):
        members.add_column(header, justify="right")
    members.add_column("pairs, of the heaviest")
    members.add_column("rows, as request: positions")
    heaviest = max(facts["attention_pairs"])
    for member, (rank, pairs) in enumerate(zip(facts["ranks"], facts["attention_pairs"], strict=True)):
        share = Text(_bar(pairs, heaviest), style=_style(member))
        rows = ", ".join(f"{row['request']}: {_span(row['start'], row['length'])}" for row in rank["rows"])
        members.add_row(Text(str(member), style=_style(member)), str(len(rank["positions"])), str(pairs), share, rows)
    return Group(Text(title), requests, members)


_REQUEST_WIDTH = 40
"""Characters that a request's bar is drawn with, or a few more."""

TABLES: dict[str, Callable[[dict[str, Any]], Group]] = {
    "slots": slots_table,
    "lengths": lengths_table,
    "groups": groups_table,
    "transfer": transfer_table,
    "zigzag": zigzag_table,
}
"""Drawing of each topic, from the facts that its JSON carries."""


def _span(start: int, length: int) -> str:
    return str(start) if length == 1 else f"{start}–{start + length - 1}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _style(index: int) -> str:
    return _SHARD_STYLES[index % len(_SHARD_STYLES)]


def _bar(part: int, whole: int) -> str:
    return "█" * (20 * part // whole) if whole else ""


def _slot(shard: int, slot: int) -> Text:
    return Text("−1", style="dim") if slot < 0 else Text(str(slot), style=f"bold {_style(shard)}")
