"""Every interval and deadline of the coordinator, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Tests shorten them; nothing else in the package names a duration."""

    poll_interval_s: float = 0.5
    """Between two progress polls of a rank."""
    poll_deadline_s: float = 2.0
    """A rank whose event loop does not answer for so long is frozen."""
    loading_poll_deadline_s: float = 10.0
    """The same until it has its weights: reading and compiling on all cores of a busy host keep an event loop waiting."""
    look_s: float = 0.1
    """Between two looks whether a poll is answered; a look that comes late shows that this process is held up."""
    forgiven_s: float = 20.0
    """Of the time by which this process is held up, what at most is not held against a rank, in one silence or stall."""
    stall_floor_s: float = 5.0
    """Least age of a worker's last progress at which it counts as stuck; 4 × the predicted step where that is more."""
    step_floor_s: float = 10.0
    """Least bound on the collectives of a step; 4 × the predicted step where that is more."""
    step_margin_s: float = 2.0
    """What the coordinator waits beyond a step's own bound."""
    configure_s: float = 1800.0
    """Loading weights."""
    command_s: float = 60.0
    """Any other command, also one that queues behind a collective that has to time out first."""
    open_group_s: float = 30.0
    """Until all members of a group have met."""
    measure_s: float = 3.0
    """Timing the exchanges of a set's replicas, once, before it serves."""
    cause_s: float = 0.2
    """After a rank's collective has failed: for signs of another rank's end, which would be the cause."""
    text_s: float = 30.0
    """The text thread may take for a step's text; one that finishes nothing for so long is stuck."""
    encode_s: float = 120.0
    """Until a prompt is tokenised and checked, the wait for earlier ones included."""
    retry_s: float = 0.5
    """Before a set whose groups did not open tries again, and the advice to clients of a lost rank."""
    lease_s: float = 30.0
    """How long a rank keeps blocks that others read without hearing from anybody."""
    move_again_s: float = 0.1
    """Before a second attempt to move a range; twice as long before each further one."""
    beside_s: float = 5.0
    """A call beside the lane that carries no KV itself."""
    pull_s: float = 60.0
    """Moving one range of a request to one rank."""
    start_s: float = 600.0
    """From listening to serving."""
    stop_s: float = 2.0
    """For calls that are still open when the process stops."""
