"""One member of a group in a process of its own.

Arguments: backend, mode (`mixed-COUNT`, `endless` or `leaving`), index, size, timeout in seconds, bootstrap. Member 0 prints
the bootstrap bytes that the others are started with.
"""

import sys
import threading

import torch

from rank_server.collectives.base import CollectiveError
from rank_server.collectives.table import backends
from tests.rank_server.collectives.harness import check_mixed_operations


def main(backend_name: str, mode: str, index: int, size: int, timeout_s: float, bootstrap: str) -> None:
    backend = backends("127.0.0.1")[backend_name]()
    if index == 0:
        bootstrap = backend.prepare("g", range(size)).decode()
        print(bootstrap, flush=True)
    group = backend.open("g", range(size), index, bootstrap.encode(), 30.0)
    group.set_timeout(timeout_s)
    if mode.startswith("mixed-"):
        check_mixed_operations(group, int(mode.removeprefix("mixed-")))
        print(f"{group.calls} operations", flush=True)
        group.close()
        return
    group.barrier()
    if mode == "leaving" and index == 0:
        threading.Timer(0.2, group.close).start()
    print("running", flush=True)
    if mode == "leaving" and index > 0:
        sys.stdin.read()
        return
    try:
        while True:
            group.all_reduce(torch.ones(10_000))
    except CollectiveError as error:
        print(f"lost: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6])
