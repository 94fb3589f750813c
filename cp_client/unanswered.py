"""What a call says that the coordinator has not answered. gRPC's own words are about sockets and streams; these name the
address that was asked for and what can be done. They stay in the error's `__context__`."""

from cp_wire.errors import Code, DeadlineExceeded, Internal, KvloomError, RpcError, Unavailable, from_rpc_error


def error_of(failed: RpcError, target: str, timeout_s: float, *, begun: bool = False) -> KvloomError:
    """The error behind a call to `target` (HOST:PORT) that had `timeout_s` seconds, in the coordinator's own words where it has
    sent some. begun: whether a part of the answer has come.
    """
    error = from_rpc_error(failed)
    if error.is_told:
        return error
    if isinstance(error, Unavailable):
        if begun:
            return Unavailable(f"the coordinator at {target} went away in the middle of the answer")
        return Unavailable(f"no kvloom coordinator answers at {target}: is it running? `kvloom up` starts one")
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"no whole answer from {target} within {timeout_s:g} s")
    if failed.code() is Code.UNIMPLEMENTED:
        return Internal(f"what answers at {target} is no kvloom coordinator, or one of another version: it has no such call")
    return error
