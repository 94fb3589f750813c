"""What one cluster serves under load: `kvloom bench serve`.

The cluster is started (`--up`) or runs already (`--target`). A level is a prompt length and a number of requests that are
under way together: as soon as one has ended, the next is sent, until all of the level have been. Every run goes through all
levels in turn, so that a drift of the machine meets them alike. Prompts never meet the prefix cache. Times are the client's,
over all answers of a level; tokens per second are those of a run, from its first request's begin to its last one's end, at
which fewer and fewer are under way. Gains are ratios within a run: output tokens per second against the fewest at once.
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from benchmarks.load import Level, Taken, at_once, prompts, rounds, times
from benchmarks.plot import line_chart
from cp_client import Client
from cp_client.errors import KvloomError
from cp_client.events import Completion
from cp_client.exit_status import DONE, FAILED
from cp_client.server_args import target
from cp_wire.flags import integer
from cp_wire.words import counted

Ask = Callable[[Sequence[int], str], Completion | KvloomError]
"""(prompt, salt) → the whole answer, or what the request ended with."""


@dataclass(slots=True)
class Run(Taken):
    """What one run did at one level."""

    errors: Counter[str] = field(default_factory=Counter)
    """Requests by the gRPC status that they ended with."""


def asking(client: Client, new_tokens: int) -> Ask:
    """Asks for exactly so many tokens."""

    def ask(prompt: Sequence[int], salt: str) -> Completion | KvloomError:
        try:
            return client.complete(token_ids=prompt, cache_salt=salt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        except KvloomError as error:
            return error

    return ask


def warm_up(ask: Ask, lengths: Sequence[int], vocabulary: int, salt: str) -> None:
    """One request of each prompt length; raises the KvloomError that one ends with."""
    for length in lengths:
        (answer,), _ = at_once(ask, list(prompts(length, 1, vocabulary, Random(0))), f"{salt} warm-up")
        if isinstance(answer, KvloomError):
            raise answer


def measure(ask: Ask, levels: Sequence[Level], args: Namespace, salt: str) -> dict[Level, list[Run]]:
    """All levels in turn, `args.runs` times; at least `args.requests` requests of each in a run."""
    random = Random(1)
    found: dict[Level, list[Run]] = {level: [] for level in levels}
    for number in range(args.runs):
        for level in levels:
            count = rounds(args.requests, level.concurrency) * level.concurrency
            batch = list(prompts(level.prompt, count, args.vocabulary, random))
            ended, seconds = at_once(ask, batch, f"{salt} {number} {level}", level.concurrency)
            run = Run([end for end in ended if not isinstance(end, KvloomError)], seconds)
            run.errors.update(end.code.name for end in ended if isinstance(end, KvloomError))
            found[level].append(run)
    return found


def rows_of(found: Mapping[Level, Sequence[Run]]) -> list[dict[str, Any]]:
    """The document's rows. What cannot be told where nothing was answered is None."""
    fewest = min(level.concurrency for level in found)
    rows = []
    for level, runs in found.items():
        base = found[Level(level.prompt, fewest)]
        pairs = [(run.output_tokens_per_s, lone.output_tokens_per_s) for run, lone in zip(runs, base, strict=True)]
        gains = [rate / alone for rate, alone in pairs if alone]
        answers = [answer for run in runs for answer in run.answers]
        rows.append(
            {
                **level._asdict(),
                "answered": len(answers),
                "errors": dict(sum((run.errors for run in runs), Counter[str]())),
                **(times(answers) if answers else {"ttft_ms": None, "tpot_ms": None}),
                "output_tokens_per_s": spread([rate for rate, _ in pairs]),
                "tokens_per_s": spread([run.tokens_per_s(level) for run in runs]),
                "gain": spread(gains) if gains else None,
            }
        )
    return rows


def lines(rows: Sequence[Mapping[str, Any]], args: Namespace) -> list[str]:
    """The summary for people."""
    what = f"kvloom up {args.up}" if args.target is None else args.target
    sizes = f"{counted(args.new_tokens, 'new token')}, {counted(args.runs, 'run')}"
    head = f"{what}: {sizes}, medians (min–max); gain: output tokens/s against"
    body = [
        f"{row['prompt']:>6} tokens, {row['concurrency']:>3} at once: TTFT {_told(row['ttft_ms'])} ms  "
        f"TPOT {_told(row['tpot_ms'])} ms  output {_told(row['output_tokens_per_s'])}/s  all {_told(row['tokens_per_s'])}/s  "
        f"gain {_told(row['gain'], 2)}×  " + (", ".join(f"{code} {n}" for code, n in row["errors"].items()) or "no errors")
        for row in rows
    ]
    return [f"{head} {min(row['concurrency'] for row in rows)} at once", *body]


def _told(figure: Mapping[str, float] | None, digits: int = 1) -> str:
    if figure is None:
        return "–"
    return f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f}–{figure['max']:.{digits}f})"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Output tokens per second over requests at once, a line per prompt length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"prompts of {row['prompt']}"
        series.setdefault(name, []).append((row["concurrency"], row["output_tokens_per_s"]["median"]))
    series = {name: sorted(points) for name, points in series.items()}
    line_chart(path, "One cluster under load", "requests at once", "output tokens/s", series)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 1 also where a level was never answered."""
    flags = parser("serve", "one cluster under load", plot="output tokens per second by requests at once")
    which = flags.add_mutually_exclusive_group()
    which.add_argument("--up", default="-pcp 2 -dcp 2", help="flags of `kvloom up` for an own cluster (default: %(default)s)")
    which.add_argument("--target", type=target, metavar="HOST:PORT", help="coordinator of a running cluster to load instead")
    flags.add_argument("--prompts", type=integers(1), default=[256], help="tokens, comma-separated (default: 256)")
    flags.add_argument("--concurrency", type=integers(1), default=[1, 4, 16], help="requests at once (default: 1,4,16)")
    flags.add_argument("--requests", type=integer(1), default=4, help="least requests of a level and run (default: 4)")
    flags.add_argument("--new-tokens", type=integer(2), default=32, help="tokens of an answer (default: 32)")
    flags.add_argument("--runs", type=integer(1), default=3, help="how often each level is asked (default: 3)")
    flags.add_argument(
        "--vocabulary", type=integer(2), default=256, help="prompts are of token ids below this (default: 256, which every "
        "vocabulary that spells bytes has)",
    )  # fmt: skip
    args = flags.parse_args(argv)
    levels = [Level(*pair) for pair in product(dict.fromkeys(args.prompts), dict.fromkeys(args.concurrency))]
    salt = str(uuid4())  # a running cluster may still have the prompts of the last benchmark
    with cluster(*args.up.split()) if args.target is None else Client(args.target) as client:
        config = client.config()
        ask = asking(client, args.new_tokens)
        warm_up(ask, args.prompts, args.vocabulary, salt)
        rows = rows_of(measure(ask, levels, args, salt))
    document = {
        "benchmark": "serve",
        "machine": machine(),
        **({"up": args.up} if args.target is None else {"target": args.target}),
        "cluster": {"model": config.model_name, **{name: getattr(config, name) for name in ("tp", "pcp", "dcp", "dp")}},
        **{name: getattr(args, name) for name in ("requests", "new_tokens", "runs", "vocabulary")},
        "rows": rows,
    }
    report(args, document, lines(rows, args), lambda path: plot(rows, path))
    return DONE if all(row["answered"] for row in rows) else FAILED


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
