"""Collectives over TCP: one torch ProcessGroupGloo per group, members only, over the group's own store.

Only bytes travel: every tensor is exchanged as uint8, so that all dtypes take the same path; sums are `exchange`'s. gloo can't
be interrupted from outside, hence the care with `close`: a member that waits looks up every `SLICE_S` whether its group was
closed, and a process group with an operation still in flight is destroyed by a thread that first waits for the operation's own
deadline (the destructor would otherwise block the caller until then).
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BarrierOptions, BroadcastOptions

from rank_server.collectives.base import CollectiveError, Group
from rank_server.collectives.exchange import ExchangeGroup
from rank_server.collectives.solo import SoloGroup

SLICE_S = 0.05
"""Longest time until a waiting member notices that its group was closed."""
_ADDRESS = re.compile(r"\[[^\]\s]+\]:\d+|\([^()\s]+, \d+\)|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
"""[IP]:port, (host, port) and IPv4[:port], as gloo and its store write them."""
WILDCARDS = ("", "0.0.0.0", "::")


class GlooGroup(ExchangeGroup):
    """One member's end of a process group."""

    def __init__(self, name: str, size: int, index: int, timeout_s: float, process_group: Any, store: Any) -> None:
        super().__init__(name, size, index, timeout_s)
        self._process_group = process_group
        self._store = store
        self._work: Any = None

    def _gather(self, op: str, x: Tensor) -> Tensor:
        # Everything to everybody directly: between processes of one host it takes half to four fifths of the time of gloo's
        # all-gather, whose ring has N − 1 rounds.
        return self._swap(op, x.expand(self.size, *x.shape).contiguous())

    def _swap(self, op: str, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        self._run(lambda group: group.alltoall_base(_bytes(result), _bytes(x), [], [], self._timeout()))
        return result

    def _copy(self, x: Tensor, root: int) -> Tensor:
        result = x.clone()
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._timeout()
        self._run(lambda group: group.broadcast([_bytes(result)], options))
        return result

    def _meet(self) -> None:
        options = BarrierOptions()
        options.timeout = self._timeout()
        self._run(lambda group: group.barrier(options))

    def _timeout(self) -> timedelta:
        return timedelta(seconds=max(self._timeout_s, 0.001))

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Starts an operation and waits for it, for its deadline or for `close`; RuntimeError when it fails."""
        # An operation is several messages, each with the whole timeout: the deadline over all of them is kept here.
        deadline = time.monotonic() + self._timeout_s + SLICE_S
        with self._state:
            self._check_open()
            # The process group is never held in a local variable: a traceback that keeps the frame alive would delay its end.
            work = self._work = start(self._process_group)
        while not _finished(work):
            self._check_open()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not finished within {self._timeout_s:g} s")

    def _release(self, reason: str) -> None:
        process_group, work = self._process_group, self._work
        self._process_group = self._work = None
        if work is not None and not work.is_completed():
            held = [process_group, self._store]
            threading.Thread(target=_destroy_later, args=(held, work), name=f"close {self.name}", daemon=True).start()
        self._store = None


def _finished(work: Any) -> bool:
    """Waits one slice; raises the operation's own error."""
    try:
        work.wait(timedelta(seconds=SLICE_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(_cause(error)) from error
    return True


def _cause(error: RuntimeError) -> str:
    """gloo's message without the place in its source, without advice and without the addresses of peers."""
    return _ADDRESS.sub("[peer]", re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". This is typically")[0])


def _destroy_later(held: list[Any], work: Any) -> None:
    # Asks instead of waiting in torch: a daemon thread that the interpreter's end finds inside C++ would abort the process.
    while not work.is_completed():
        time.sleep(SLICE_S)
    held.clear()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class GlooBackend:
    """`Backend` of one process; the store and all connections are bound to `host`.

    Raises ValueError for a wildcard address: peers could not connect to it, and strangers could.
    """

    def __init__(self, host: str) -> None:
        if host in WILDCARDS:
            raise ValueError(f"collectives need the address or name of this host, not the wildcard {host!r}")
        self._host = host
        self._stores: dict[str, tuple[bytes, Any]] = {}

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """See `Backend`; the bootstrap bytes are host:port of the group's store."""
        if len(ranks) == 1:
            return b""
        try:
            listener = socket.create_server((self._host, 0))
        except OSError as error:
            raise CollectiveError(f"group {name}: no store on {self._host}: {error}") from error
        port = listener.getsockname()[1]
        # The store takes the descriptor over, and with it the address it is bound to; by itself it would bind all addresses.
        store = dist.TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=5),
        )
        bootstrap = f"{self._host}:{port}".encode()
        self._stores[name] = (bootstrap, store)
        return bootstrap

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        """See `Backend`."""
        if len(ranks) == 1:
            return SoloGroup(name)
        index = list(ranks).index(rank)
        deadline = time.monotonic() + timeout_s
        timeout = timedelta(seconds=timeout_s)
        try:
            store = self._store(name, index, bootstrap, timeout)
            store.set_timeout(timeout)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
            options._timeout = timeout
            options._threads = 1
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)]
            process_group = dist.ProcessGroupGloo(store, index, len(ranks), options)
        except RuntimeError as error:
            raise CollectiveError(f"group {name}, member {index} of {len(ranks)}: open failed: {_cause(error)}") from error
        group = GlooGroup(name, len(ranks), index, max(deadline - time.monotonic(), SLICE_S), process_group, store)
        del process_group, store
        group.barrier()
        group.set_timeout(timeout_s)
        group.calls = 0
        return group

    def _store(self, name: str, index: int, bootstrap: bytes, timeout: timedelta) -> Any:
        if index == 0:
            prepared, store = self._stores.pop(name, (b"", None))
            if store is None or prepared != bootstrap:
                raise CollectiveError(f"group {name} was not prepared under {bootstrap!r}")
            return store
        host, separator, port = bootstrap.decode(errors="replace").rpartition(":")
        if not separator or not port.isdigit():
            raise CollectiveError(f"group {name}: bootstrap {bootstrap!r} is not host:port")
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
