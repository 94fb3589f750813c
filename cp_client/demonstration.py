"""A cluster, one streamed answer, and nothing left behind."""

import sys
from collections.abc import Sequence

from cp_client.async_client import AsyncClient
from cp_client.cli import build_parser
from cp_client.launcher import Cluster, ClusterFailed
from cp_client.refusals import unless_refused
from cp_client.up_command import cluster_spec
from cp_wire import process
from cp_wire.errors import KvloomError
from cp_wire.logs import configure_logging
from cp_wire.words import counted

PROMPT = "Why is the sky blue? Answer in two sentences."


async def answer(target: str, prompt: str) -> None:
    """Prints the answer as it comes, then what it cost."""
    async with AsyncClient(target) as client:
        print(f"\n> {prompt}\n", flush=True)
        async for event in client.generate(messages=[{"role": "user", "content": prompt}], max_tokens=64, temperature=0):
            print(event.text, end="", flush=True)
            if event.usage and event.route and event.timing:
                tokens, shards = counted(event.usage.completion_tokens, "token"), counted(event.route.cp, "KV shard")
                print(
                    f"\n\n{tokens} from ranks {list(event.route.ranks)} with {shards}: "
                    f"first after {event.timing.ttft_ms or 0:.0f} ms, then {event.timing.tpot_ms or 0:.0f} ms each",
                    flush=True,
                )


def demonstrate(words: Sequence[str]) -> int:
    """Returns the exit status; `words` are those of the prompt."""
    configure_logging("demo")
    prompt = " ".join(words) or PROMPT
    return unless_refused(lambda: _run(Cluster(cluster_spec(build_parser("up").parse_args(["up"]))), prompt))


def _run(cluster: Cluster, prompt: str) -> int:
    async def demo() -> int:
        try:
            await answer(await cluster.start(), prompt)
        except (ClusterFailed, KvloomError) as failure:
            print(f"kvloom: {failure}", file=sys.stderr)
            return process.FAILED
        finally:
            await cluster.stop()
        return process.DONE

    return process.run(demo, on_second_signal=cluster.kill)
