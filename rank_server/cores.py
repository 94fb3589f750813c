"""Which CPUs a rank computes on."""

import os
from collections.abc import Sequence

from cp_wire.logs import get_logger

log = get_logger("rank")


def own_cores(cpus: Sequence[int], rank: int, ranks_on_host: int, threads: int) -> tuple[int, ...]:
    """The CPUs, out of those that the ranks of a host may use, that this rank's compute threads keep to; () = any.

    Ranks that together take each CPU once keep to their own: one that the system moves beside another, for want of a better
    place at that moment, holds up all members of its groups. With fewer threads than CPUs, or more, the system places
    them better than a rule that knows nothing of other processes. Ranks of a host are taken to be consecutive.
    """
    if ranks_on_host == 1 or ranks_on_host * threads != len(cpus):
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
        log.warning("the rank does not keep to its own CPUs", cpus=list(cores), why=str(error))
