"""Whether the cost model picks the better gather: `kvloom bench chooser`.

Three clusters of two ranks of one thread each, up at the same time and asked in turn: queries travel, keys travel, the
coordinator chooses. A cell of the grid is one chunk of S_q new tokens after S_ctx tokens that the prefix cache holds, so it is
one step; its time is that of the slowest rank. The choice is right where its median is within 10 % of the better way's, or
where the two ways are closer than they scatter.
"""

import sys
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.crossings import crossover
from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from benchmarks.plot import line_chart
from coordinator.set_maker import cost_model
from cp_client import Client
from cp_client.default_model import default_model_path
from cp_layout.cost import Rates, StepFacts, seconds
from cp_wire.flags import integer
from cp_wire.pb import common_pb2, coordinator_pb2
from cp_wire.words import counted, percent
from model_files import open_model

WAYS = ("q", "kv")
AUTO = "auto"
CONTEXT_UNIT = 32
"""Tokens of a virtual block of the clusters: the prefix cache holds whole ones."""
TOLERANCE = 1.10
"""Times the better way that a right choice may take."""
GATHERS = {common_pb2.GATHER_Q: "q", common_pb2.GATHER_KV: "kv"}
WORDS = range(100, 40100)


class Cell(NamedTuple):
    """A step of the grid."""

    new: int
    """S_q."""
    context: int
    """S_ctx."""


@dataclass(slots=True)
class Taken:
    """What a cell was measured to take, in ms, and what was chosen for it."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in (*WAYS, AUTO)})
    chosen: Counter[str] = field(default_factory=Counter)


def grid(text: str) -> list[Cell]:
    """From S_q,…xS_ctx,…: all pairs, ascending; ArgumentTypeError where it is none, or an S_ctx no prefix that is cached."""
    parts = text.split("x")
    if len(parts) != 2:
        raise ArgumentTypeError(f"{text!r} is not S_q,…xS_ctx,… such as 32,512x0,1024")
    new, contexts = (sorted(set(integers(minimum)(part))) for minimum, part in zip((1, 0), parts, strict=True))
    odd = [context for context in contexts if context % CONTEXT_UNIT]
    if odd:
        raise ArgumentTypeError(f"{odd[0]} cached tokens are not a multiple of {CONTEXT_UNIT}")
    return [Cell(*pair) for pair in product(new, contexts)]


def scatter(times: Sequence[float]) -> float:
    """Interquartile range; 0 of a single measurement."""
    if len(times) < 2:
        return 0.0
    first, _, third = quantiles(times, n=4, method="inclusive")
    return third - first


def agree(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two ways are closer than the more scattered of them scatters."""
    return abs(median(one) - median(other)) <= max(scatter(one), scatter(other))


def verdict(taken: Taken) -> dict[str, Any]:
    """Better way, choice (of several: the most frequent), what it loses, and whether it is right."""
    medians = {way: median(taken.ms[way]) for way in WAYS}
    better, chosen = min(medians, key=medians.__getitem__), taken.chosen.most_common(1)[0][0]
    loss = medians[chosen] / medians[better] - 1
    same = agree(taken.ms["q"], taken.ms["kv"])
    return {
        "better": better,
        "chosen": chosen,
        "choices": dict(taken.chosen),
        "loss": round(loss, 4),
        "ways_agree": same,
        "right": same or loss <= TOLERANCE - 1,
    }


class Prediction:
    """Seconds of a cell by the model and the rates of a running cluster. path: of what it serves."""

    def __init__(self, path: Path, config: common_pb2.ClusterConfig, status: coordinator_pb2.GetStatusResponse) -> None:
        self._model = cost_model(open_model(path).shape, config)
        told = status.links[0].rates
        self.rates = Rates(**{name: getattr(told, name) for name in Rates._fields})

    def ms(self, cell: Cell) -> dict[str, float]:
        """Of both ways."""
        pairs = cell.new * cell.context + cell.new * (cell.new + 1) // 2
        facts = StepFacts(prefill_rows=1, prefill_tokens=cell.new, prefill_context=cell.context, prefill_pairs=pairs)
        works = {"q": self._model.owner_q(facts), "kv": self._model.owner_kv(facts)}
        return {way: 1000 * seconds(work, self.rates) for way, work in works.items()}


def prompts(cell: Cell, context: Sequence[int], random: Random, words: Sequence[int]) -> list[int]:
    """The cell's context and new tokens that nobody has seen."""
    return [*context[: cell.context], *random.choices(words, k=cell.new)]


def ask(client: Client, cell: Cell, prompt: Sequence[int]) -> tuple[float, str]:
    """Milliseconds of the slowest rank, and what was gathered; SystemExit when the cell was not one step of its size."""
    before = client.status()
    done = client.complete(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt="chooser")
    after = client.status()
    counts = _gathered(after) - _gathered(before)
    if done.usage.cached_tokens != cell.context or sum(counts.values()) != 1:
        raise SystemExit(
            f"{counted(cell.new, 'token')} after {cell.context} went into {counted(sum(counts.values()), 'step')} "
            f"after {counted(done.usage.cached_tokens, 'cached token')}: contexts have to fit into the pool"
        )
    (gathered,) = counts
    return 1000 * (after.step_times.total_rank_s - before.step_times.total_rank_s), gathered


def _gathered(status: coordinator_pb2.GetStatusResponse) -> Counter[str]:
    return Counter({GATHERS[each.gather]: each.steps for each in status.step_counts if each.gather in GATHERS})


def measure(clients: Mapping[str, Client], cells: Sequence[Cell], runs: int, words: Sequence[int]) -> dict[Cell, Taken]:
    """All cells in all ways, `runs` times in turn, after a round that does not count. words: what prompts are made of."""
    random = Random(1)
    context = random.choices(words, k=max(cell.context for cell in cells))
    found = {cell: Taken() for cell in cells}
    for client in clients.values():
        client.complete(token_ids=[*context, words[0]], max_tokens=1, ignore_eos=True, cache_salt="chooser")
    for run in range(runs + 1):
        for cell, taken in found.items():
            prompt = prompts(cell, context, random, words)
            for way, client in clients.items():
                ms, gathered = ask(client, cell, prompt)
                if run:
                    taken.ms[way].append(ms)
                    if way == AUTO:
                        taken.chosen[gathered] += 1
    return found


def by_new(cells: Iterable[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    """Cells of each S_q, contexts ascending."""
    rows: dict[int, list[Cell]] = {}
    for cell in sorted(cells):
        rows.setdefault(cell.new, []).append(cell)
    yield from rows.items()


def crossovers(found: Mapping[Cell, Taken], predicted: Mapping[Cell, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Per S_q the context from which queries should travel, as measured and as predicted; None beyond the grid."""
    rows = []
    for new, cells in by_new(found):
        contexts = [cell.context for cell in cells]
        medians = [[median(found[cell].ms[way]) for cell in cells] for way in WAYS]
        expected = [[predicted[cell][way] for cell in cells] for way in WAYS]
        rows.append({"new": new, "measured": crossover(contexts, *medians), "predicted": crossover(contexts, *expected)})
    return rows


def plot(found: Mapping[Cell, Taken], predicted: Mapping[Cell, Mapping[str, float]], path: Path) -> None:
    """Time with gathered queries over that with gathered keys, by context; the crossover is where a line meets 1."""
    series: dict[str, list[tuple[float, float]]] = {}
    for new, cells in by_new(found):
        later = [cell for cell in cells if cell.context]
        ratios = [median(found[cell].ms["q"]) / median(found[cell].ms["kv"]) for cell in later]
        expected = [predicted[cell]["q"] / predicted[cell]["kv"] for cell in later]
        for kind, values in (("measured", ratios), ("predicted", expected)):
            series[f"{new} new, {kind}"] = [(cell.context, value) for cell, value in zip(later, values, strict=True)]
    line_chart(path, "Queries travel ÷ keys travel", "cached tokens", "time ratio", series)


Found = dict[Cell, Taken]
Predicted = dict[Cell, dict[str, float]]


def found_and_predicted(path: Path, cells: Sequence[Cell], runs: int, words: Sequence[int]) -> tuple[Found, Predicted, Rates]:
    """What clusters that serve the model take for the cells, what the third one's model expects, with the rates it learnt."""
    budget = str(max(cell.new for cell in cells))
    up = (str(path), "-pcp", "2", "-dcp", "2", "--threads-per-rank", "1", "--max-num-batched-tokens", budget)
    with ExitStack() as clusters:
        clients = {way: clusters.enter_context(cluster(*up, "--pcp-gather", way)) for way in (*WAYS, AUTO)}
        found = measure(clients, cells, runs, words)
        prediction = Prediction(path, clients[AUTO].config(), clients[AUTO].status())
    return found, {cell: prediction.ms(cell) for cell in cells}, prediction.rates


def rows_of(found: Found, predicted: Predicted) -> list[dict[str, Any]]:
    """The document's rows."""
    return [
        {
            **cell._asdict(),
            "ms": {way: spread(times) for way, times in taken.ms.items()},
            "predicted_ms": {way: round(ms, 3) for way, ms in predicted[cell].items()},
            **verdict(taken),
        }
        for cell, taken in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser(
        "chooser", "whether the cost model picks the better gather of a prefill step", plot="predicted and measured ratios"
    )
    flags.add_argument(
        "--grid", type=grid, default="32,128,512x0,512,1024,2048,4096", metavar="S_q,…xS_ctx,…",
        help=f"new and cached tokens, the latter multiples of {CONTEXT_UNIT} (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument("--runs", type=integer(1), default=7, help="measurements of each cell and way (default: 7)")
    args = flags.parse_args(argv)
    if args.plot is not None and not any(cell.context for cell in args.grid):
        flags.error("--plot draws over cached tokens, and --grid has none")
    found, predicted, rates = found_and_predicted(default_model_path(), args.grid, args.runs, WORDS)
    rows = rows_of(found, predicted)
    share = sum(row["right"] for row in rows) / len(rows)
    document = {
        "benchmark": "chooser",
        "machine": machine(),
        "runs": args.runs,
        "rates": rates._asdict(),
        "rows": rows,
        "crossovers": crossovers(found, predicted),
        "right": round(share, 4),
    }
    report(args, document, summary(document), lambda path: plot(found, predicted, path))
    return 0


def summary(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    lines = ["ms of the slowest rank, medians; predictions in parentheses; = where the ways agree, ! where the choice is wrong"]
    for row in document["rows"]:
        times = "  ".join(f"{way} {row['ms'][way]['median']:8.1f} ({row['predicted_ms'][way]:.1f})" for way in WAYS)
        mark = "=" if row["ways_agree"] else " " if row["right"] else "!"
        lines.append(f"{row['new']:>5} after {row['context']:>6}: {times}  chosen {row['chosen']:<2} {row['loss']:+.1%} {mark}")
    lines.append(f"right in {percent(document['right'], 0)} of {counted(len(document['rows']), 'cell')}")
    for row in document["crossovers"]:
        where = ", ".join(f"{kind} {_context(row[kind])}" for kind in ("measured", "predicted"))
        lines.append(f"{counted(row['new'], 'new token'):>16}: queries travel from {where} cached tokens on")
    return lines


def _context(tokens: float | None) -> str:
    return "no" if tokens is None else f"{tokens:.0f}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
