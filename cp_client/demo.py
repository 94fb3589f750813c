"""`python -m cp_client.demo [PROMPT]`: a cluster, one streamed answer, and nothing left behind."""

import sys
from collections.abc import Sequence

from cp_client.guard import guarded


def main(words: Sequence[str]) -> int:
    """Returns the exit status; `words` are those of the prompt."""
    return guarded(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    from cp_client.demonstration import demonstrate  # takes its time: Ctrl-C may come meanwhile

    return demonstrate(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
