"""What it costs that a prompt's KV has to move: time to the second token, `kvloom bench second-token`.

Two clusters of two ranks with one thread each, both up and measured in turn: *apart*, one rank for prompts and one for outputs,
and *together*, two replicas that do both. A lone prompt is computed by one rank in either, so what differs is the KV's way to
the other rank. The first token comes from the rank that computed the prompt, the second needs all of the prompt's KV. While a
prompt is computed, the coordinator's counters are read again and again: `moved_before_first` is the part of the KV that was
seen on the other rank while the first token was still to come. Prompts never meet the prefix cache.
"""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from cp_client import Client
from cp_wire.flags import integer
from cp_wire.words import counted, percent

WAYS = {
    "together": "-tp 1 -pcp 1 -dcp 1 -dp 2",
    "apart": "--prefill-ranks 1 --decode-ranks 1",
}
LOOK_S = 0.01
"""Between two reads of the counters."""


class Watch:
    """Reads how many bytes have moved until it is told that the first token is there. `moved`: the last number before that."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = client.status().transfers.payload_bytes
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.moved = 0
        self._thread.start()

    def first_token(self) -> None:
        """It is there."""
        self._first.set()

    def close(self) -> int:
        """Bytes of the whole request, once it has ended."""
        self._first.set()
        self._thread.join()
        return self._client.status().transfers.payload_bytes - self._before

    def _look(self) -> None:
        while not self._first.wait(LOOK_S):
            moved = self._client.status().transfers.payload_bytes - self._before
            if not self._first.is_set():
                self.moved = moved


def measure(client: Client, tokens: int, salt: str) -> dict[str, float]:
    """One prompt of so many tokens, two tokens out: ms to each of them, as the client sees it, and what had moved when."""
    prompt = [(i * 7919 + tokens) % 40000 + 100 for i in range(tokens)]
    watch, begun, times = Watch(client), time.perf_counter(), []
    try:
        for event in client.generate(token_ids=prompt, max_tokens=2, temperature=0.0, ignore_eos=True, cache_salt=salt):
            times += [(time.perf_counter() - begun) * 1e3] * len(event.token_ids)
            if times:
                watch.first_token()
    finally:
        moved = watch.close()
    if len(times) != 2:
        raise SystemExit(
            f"a prompt of {counted(tokens, 'token')} was answered with {counted(len(times), 'token')} instead of 2"
        )
    result = {"first_ms": times[0], "second_ms": times[1]}
    return result | ({"moved_before_first": watch.moved / moved, "moved_bytes": moved} if moved else {})


def row_of(tokens: int, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What the runs of a length say; ratio: of the medians of the times to the second token, apart to together. SystemExit when
    the KV of a run was computed again instead of moved: then its times say nothing of a move."""
    if any("moved_bytes" not in run for run in runs["apart"]):
        raise SystemExit(f"the KV of a prompt of {counted(tokens, 'token')} did not come over")
    row: dict[str, Any] = {"tokens": tokens}
    for way, each in runs.items():
        row[way] = {key: spread([run[key] for run in each]) for key in each[0]}
    row["ratio"] = round(row["apart"]["second_ms"]["median"] / row["together"]["second_ms"]["median"], 3)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("second-token", "time to the second token where prompts and outputs have ranks of their own")
    flags.add_argument("--prompts", type=integers(1), default=(4096,), help="tokens, comma-separated (default: 4096)")
    flags.add_argument("--runs", type=integer(1), default=5, help="prompts of each length and way, after one more (default: 5)")
    flags.add_argument(
        "--up",
        default="--threads-per-rank 1 --max-num-batched-tokens 512",
        help="flags of `kvloom up` for both clusters (default: %(default)s)",
    )
    args = flags.parse_args(argv)
    up = args.up.split()
    with cluster(*WAYS["together"].split(), *up) as together, cluster(*WAYS["apart"].split(), *up) as apart:
        clients = {"together": together, "apart": apart}
        rows = []
        for tokens in args.prompts:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in clients}
            for number in range(args.runs + 1):
                for way, client in clients.items():
                    runs[way].append(measure(client, tokens, f"{tokens}/{number}"))
            rows.append(row_of(tokens, {way: each[1:] for way, each in runs.items()}))
    document = {"benchmark": "second-token", "machine": machine(), "ways": WAYS, "up": args.up, "runs": args.runs, "rows": rows}
    lines = [f"kvloom up {args.up}: ms to the first and the second token, medians of {args.runs} (min–max)"]
    for row in rows:
        for way in WAYS:
            first, second = row[way]["first_ms"], row[way]["second_ms"]
            lines.append(
                f"{row['tokens']:>6} tokens {way:>8}: {first['median']:8.1f} ({first['min']:.1f}–{first['max']:.1f}) "
                f"{second['median']:8.1f} ({second['min']:.1f}–{second['max']:.1f})"
            )
        early = row["apart"].get("moved_before_first", {"median": 0.0})["median"]
        lines.append(f"{row['tokens']:>6} tokens: second token {row['ratio']:.3f}×; moved before the first {percent(early)}")
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
