"""Collectives between GPUs: one NCCL communicator per group, on torch's tensors and torch's current stream.

NCCL only moves bytes here, as uint8, by all-gathers, broadcasts and grouped sends and receives. The sums are `exchange`'s: they
travel in the tensor's own dtype, are taken in fp32 and in member order, and give the same bits as every other backend, which
those of NCCL's reductions do not; from `SCATTERED_SUM_BYTES` on as many bytes travel as in a ring all-reduce.

An operation is waited for until the stream has passed it, so that its deadline is kept here: NCCL has none. Between looks at
the stream the communicator is asked for errors of its own. Whoever gives up or is closed aborts its communicator, which ends
the kernels that wait for other members.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, Protocol

import torch
from torch import Tensor

from rank_server.collectives.base import CollectiveError, Group
from rank_server.collectives.exchange import ExchangeGroup
from rank_server.collectives.solo import SoloGroup

UNIQUE_ID_BYTES = 128
"""NCCL's bootstrap: what member 0 makes and every member opens with."""
SPIN_S = 500e-6
"""How long a wait looks at the stream again and again before it sleeps in between."""
SLICE_S = 0.001
"""Longest time until a waiting member notices an error or that its group was closed."""


class Queue(Protocol):
    """Where the operations of a rank run, one after the other."""

    device: torch.device

    def aside(self, name: str, job: Callable[[], None]) -> None:
        """Runs a job for the device without making anybody wait for it."""
        ...

    def stream(self) -> int:
        """Address of the stream that the calling thread's operations go to."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Whether all that has been put into the stream so far is done, as a question to be asked again and again."""
        ...


class CudaQueue:
    """`Queue` of the GPU that is the calling thread's current device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def aside(self, name: str, job: Callable[[], None]) -> None:
        """See `Queue`."""

        def run() -> None:
            torch.cuda.set_device(self.device)  # the current device is a thread's own
            job()

        threading.Thread(target=run, name=name, daemon=True).start()

    def stream(self) -> int:
        """See `Queue`."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def mark(self) -> Callable[[], bool]:
        """See `Queue`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query


def load_library() -> Any:
    """cupy's NCCL module; ValueError says what is not installed."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"nccl collectives need cupy, of the extra gpu ({error})") from error
    if not nccl.available:
        raise ValueError("nccl collectives need the NCCL library, of the extra gpu, beside cupy")
    return nccl


class NcclGroup(ExchangeGroup):
    """One member's end of a communicator."""

    def __init__(
        self, name: str, size: int, index: int, timeout_s: float, library: Any, communicator: Any, queue: Queue
    ) -> None:
        super().__init__(name, size, index, timeout_s)
        self._library = library
        self._communicator = communicator
        self._queue = queue
        self._uint8 = library.NCCL_UINT8

    def _gather(self, op: str, x: Tensor) -> Tensor:
        result = x.new_empty((self.size, *x.shape))
        source, target = _address(x), _address(result)
        if x.nbytes:
            self._run(lambda nccl, stream: nccl.allGather(source, target, x.nbytes, self._uint8, stream))
        return result

    def _swap(self, op: str, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        source, target, chunk = _address(x), _address(result), x.nbytes // self.size

        def start(nccl: Any, stream: int) -> None:
            # Grouped, so that no member waits with its receive for a send that is still to come.
            self._library.groupStart()
            try:
                for peer in range(self.size):
                    nccl.send(source + peer * chunk, chunk, self._uint8, peer, stream)
                    nccl.recv(target + peer * chunk, chunk, self._uint8, peer, stream)
            finally:
                self._library.groupEnd()

        if chunk:
            self._run(start)
        return result

    def _copy(self, x: Tensor, root: int) -> Tensor:
        result = x.clone()
        target = _address(result)
        if x.nbytes:
            self._run(lambda nccl, stream: nccl.broadcast(target, target, x.nbytes, self._uint8, root, stream))
        return result

    def _meet(self) -> None:
        self._gather("barrier", torch.zeros(1, dtype=torch.uint8, device=self._queue.device))

    def _run(self, start: Callable[[Any, int], None]) -> None:
        """Puts an operation into the stream and waits for it, for its deadline or for `close`; RuntimeError when it fails."""
        deadline = time.monotonic() + self._timeout_s
        with self._state:
            self._check_open()
            start(self._communicator, self._queue.stream())
        finished = self._queue.mark()
        spin_end = time.monotonic() + SPIN_S
        while not finished():
            self._check()
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError(f"not finished within {self._timeout_s:g} s")
            if now < spin_end:
                os.sched_yield()
            else:
                time.sleep(SLICE_S)
        # What an abort ends is finished too, without a result.
        self._check()

    def _check(self) -> None:
        # Under the lock: a communicator that another thread aborts must not be asked any more.
        with self._state:
            self._check_open()
            self._communicator.check_async_error()

    def _release(self, reason: str) -> None:
        communicator, self._communicator = self._communicator, None
        _abort(communicator, self.name, self._queue)


def _abort(communicator: Any, name: str, queue: Queue) -> None:
    """Starts to abort, without waiting: freeing one communicator waits for the whole device, hence for the kernels of others
    that are still to be aborted."""

    def abort() -> None:
        # Whatever NCCL says about it: there is nobody left who could use the communicator.
        with contextlib.suppress(RuntimeError):
            communicator.abort()

    queue.aside(f"abort {name}", abort)


def _address(x: Tensor) -> int:
    return x.data_ptr()


class NcclBackend:
    """`Backend` of one process, for the thread whose current device is the rank's. ValueError when NCCL is not installed."""

    def __init__(self, library: Any = None, queue: Queue | None = None) -> None:
        self._library = load_library() if library is None else library
        self._queue = CudaQueue() if queue is None else queue
        self._prepared: dict[str, bytes] = {}

    def prepare(self, name: str, ranks: Sequence[int]) -> bytes:
        """See `Backend`; the bootstrap bytes are NCCL's unique id."""
        if len(ranks) == 1:
            return b""
        try:
            numbers = self._library.get_unique_id()
        except RuntimeError as error:
            raise CollectiveError(f"group {name}: no unique id: {error}") from error
        self._prepared[name] = bytes(number % 256 for number in numbers)  # cupy gives the bytes as signed numbers
        return self._prepared[name]

    def open(self, name: str, ranks: Sequence[int], rank: int, bootstrap: bytes, timeout_s: float) -> Group:
        """See `Backend`."""
        if len(ranks) == 1:
            return SoloGroup(name)
        index = list(ranks).index(rank)
        deadline = time.monotonic() + timeout_s
        if index == 0 and self._prepared.pop(name, None) != bootstrap:
            raise CollectiveError(f"group {name} was not prepared under these {len(bootstrap)} bytes")
        if len(bootstrap) != UNIQUE_ID_BYTES:
            raise CollectiveError(f"group {name}: a bootstrap of {len(bootstrap)} bytes, NCCL's has {UNIQUE_ID_BYTES}")
        try:
            communicator = self._connect(name, len(ranks), index, bootstrap, timeout_s)
        except (RuntimeError, NotDone) as error:
            said = f"not all members came within {timeout_s:g} s" if isinstance(error, NotDone) else str(error)
            raise CollectiveError(f"group {name}, member {index} of {len(ranks)}: open failed: {said}") from error
        group = NcclGroup(
            name, len(ranks), index, max(deadline - time.monotonic(), SLICE_S), self._library, communicator, self._queue
        )
        group.barrier()
        group.set_timeout(timeout_s)
        group.calls = 0
        return group

    def _connect(self, name: str, size: int, index: int, bootstrap: bytes, timeout_s: float) -> Any:
        """The communicator. It is made on a thread of its own, since NCCL waits for the members without a deadline."""
        numbers = tuple(byte - 256 if byte > 127 else byte for byte in bootstrap)
        made: Future[Any] = Future()

        def connect() -> None:
            try:
                made.set_result(self._library.NcclCommunicator(size, numbers, index))
            except BaseException as error:  # the future carries it to whoever waits
                made.set_exception(error)

        self._queue.aside(f"connect {name}", connect)
        try:
            return made.result(timeout_s)
        except NotDone:
            made.add_done_callback(lambda late: None if late.exception() else _abort(late.result(), name, self._queue))
            raise
