"""`kvloom status`: what a cluster is doing."""

import json
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from typing import Any

from cp_client.client import Client
from cp_client.exit_status import DONE, FAILED
from cp_client.plain import plain
from cp_client.request import UNARY_TIMEOUT_S
from cp_client.server_args import add_server_arguments, sentence
from cp_wire.errors import KvloomError
from cp_wire.words import counted


def add_status_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Adds `status --target HOST:PORT [--json]`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("status", help="ranks, groups and queues of a cluster", allow_abbrev=False)
    add_server_arguments(parser, UNARY_TIMEOUT_S)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(func=status)


def status(args: Namespace) -> int:
    """Exit status 0 with the status on stdout, 1 if the cluster did not answer."""
    try:
        with Client(args.target) as client:
            facts = plain(client.status(timeout=args.timeout))
    except KvloomError as error:
        print(f"kvloom: {sentence(error)}", file=sys.stderr)
        return FAILED
    if args.json:
        print(json.dumps(facts))
    else:
        _draw(facts)
    return DONE


def _draw(facts: dict[str, Any]) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from cp_client.drawing import print_table

    table = Table("rank", "role", "state", "KV blocks free / total", "last progress", "pid", "address")
    for rank in facts["ranks"]:
        state = f"{rank['state']} ({rank['fenced_reason']})" if rank["fenced_reason"] else rank["state"]
        blocks = f"{rank['kv_blocks_free']} / {rank['kv_blocks_total']}"
        progress = f"{rank['last_progress_ms']} ms"
        cells = (str(rank["rank"]), rank["role"], state, blocks, progress, str(rank["pid"]), rank["address"])
        table.add_row(*map(Text, cells))
    load = f"{facts['running']} running, {facts['waiting']} waiting"
    first = Text(f"{facts['config']['model_name']} {facts['state']}: {_sizes(facts)}; {load}")
    print_table(Group(first, table, *(Text(line) for line in _ways(facts))))


def _sizes(facts: dict[str, Any]) -> str:
    """The shape of the cluster, where it has two sides that of each."""
    sides = facts["sides"] if len(facts["sides"]) > 1 else [{"role": "", "config": facts["config"]}]
    words = []
    for side in sides:
        numbers = ", ".join(f"{name} {side['config'][name]}" for name in ("tp", "pcp", "dcp", "dp"))
        words.append(f"{side['role']} {numbers}".lstrip())
    return "; ".join(words)


def _ways(facts: dict[str, Any]) -> list[str]:
    """How steps were computed, and what the exchanges between replicas cost; nothing where there is nothing to say."""
    counts = [f"{each['decode_mode']}{_gather(each['gather'])} {each['steps']}" for each in facts["step_counts"]]
    lines = [f"steps: {', '.join(counts)}"] if counts else []
    for link in facts["links"]:
        now, then = (
            f"{link[f'{when}latency_us']:.0f} µs, {link[f'{when}bytes_per_s'] / 1e9:.2f} GB/s" for when in ("", "measured_")
        )
        lines.append(f"link {link['group']}: {now} (measured at the start: {then})")
    return [*lines, *_moved(facts["transfers"])]


def _moved(transfers: dict[str, Any]) -> list[str]:
    """What went from prefill to decode ranks, and what did not; nothing in a cluster of one side."""
    counts = {
        word: ", ".join(f"{each['cause']} {each['requests']}" for each in transfers[word]) for word in ("recomputed", "failed")
    }
    trouble = [f"{word} after {causes}" for word, causes in counts.items() if causes]
    if not transfers["ranges"] and not trouble:
        return []
    requests, messages = counted(transfers["requests"], "request"), counted(transfers["messages"], "message")
    size = f"{transfers['payload_bytes'] / 1e6:.1f} MB in {messages}, {transfers['seconds']:.1f} s"
    return ["; ".join([f"KV moved for {requests}: {size}", *trouble])]


def _gather(word: str) -> str:
    return "" if word == "none" else f" gathering {word}"
