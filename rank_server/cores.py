"""Which CPUs a rank computes on."""

import ctypes
import os
from collections.abc import Sequence

from cp_wire.logs import get_logger
from rank_server.compiled.openmp import parallel

PAIR = 2
"""Threads of the only pool that is spread: see `take_one_each`."""

log = get_logger("rank")


def own_cores(cpus: Sequence[int], rank: int, ranks_on_host: int, threads: int) -> tuple[int, ...]:
    """The CPUs, out of those that the ranks of a host may use, that this rank's compute threads keep to; () = any.

    Ranks that together take each CPU once, also one that takes all of them, keep to their own: a thread that the system moves
    beside another, for want of a better place at that moment, holds up all that wait for its part. With fewer threads than
    CPUs, or more, the system places them better than a rule that knows nothing of other processes. Ranks of a host are taken
    to be consecutive.
    """
    if ranks_on_host * threads != len(cpus):
        return ()
    first = rank % ranks_on_host * threads
    return tuple(sorted(cpus)[first : first + threads])


def keep_to(cores: Sequence[int]) -> None:
    """Keeps the calling thread, and those that it starts from now on, to these CPUs; () changes nothing.

    Where the system refuses (they may have been taken away since) it computes anywhere, and says so.
    """
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _warn(cores, error)


def take_one_each(cores: Sequence[int]) -> None:
    """Gives the calling thread one of two CPUs, and the other one to the second thread of its OpenMP pool.

    cores: as many as the pool has threads; nothing happens where that isn't two. OpenMP ends threads that a smaller team of the
    pool has no use for, and the new ones of the next team would begin on the CPU of the thread that starts them; a pool of two
    has no smaller team.
    """
    run = parallel()
    if len(cores) != PAIR or run is None:
        return
    left = list(cores)

    def take(_: int | None) -> None:
        core = left.pop()
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:
            _warn([core], error)

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(take)
    run(ctypes.cast(function, ctypes.c_void_p).value or 0, 0, PAIR)


def _warn(cores: Sequence[int], error: OSError) -> None:
    log.warning("the rank does not keep to its own CPUs", cpus=list(cores), why=str(error))
