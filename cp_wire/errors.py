"""Exceptions ↔ gRPC statuses, one table for both directions.

Statuses carry `google.rpc` details: `ErrorInfo` (reason, domain), `BadRequest` (the field of a refused request) and
`RetryInfo` (when to try again). A peer that sends none of them is understood by its status code alone.
"""

from typing import ClassVar, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cp_wire.host import join_address

DOMAIN = "kvloom"
MAX_SHOWN = 64
"""Characters of an offending value that an answer repeats."""

Code = grpc.StatusCode
RpcError = grpc.RpcError
"""What a failed call raises, in both APIs of gRPC."""


class KvloomError(Exception):
    """Anything the services answer instead of a result.

    `code` is the gRPC status, `reason` a stable upper-case word, `retryable` whether the same call may succeed later,
    `retry_after_s` when (None: no advice). `is_told` is set on an error that the peer itself has told with its reason; without
    it, gRPC of either side may have made it up: an own deadline, a broken connection.
    """

    code: ClassVar[grpc.StatusCode] = Code.UNKNOWN
    reason: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.is_told = False


class InvalidRequest(KvloomError):
    """The request can never be served: names the field, its value (shortened) and the limit."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = shorten(value)
        super().__init__(f"{field} is {shown}: {limit}")
        self.field, self.value, self.limit = field, shown, limit


class Duplicate(KvloomError):
    """A request with this id is active."""

    code = Code.ALREADY_EXISTS
    reason = "DUPLICATE"


class Unknown(KvloomError):
    """The thing named (request, model) is not here."""

    code = Code.NOT_FOUND
    reason = "NOT_FOUND"


class Exhausted(KvloomError):
    """No room now."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "EXHAUSTED"
    retryable = True


class MessageTooLarge(KvloomError):
    """A message above the limit of its channel; only the transport says so."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "MESSAGE_TOO_LARGE"


class Unavailable(KvloomError):
    """The peer is starting, draining, lost or out of reach."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"
    retryable = True


class Cancelled(KvloomError):
    """The call was cancelled."""

    code = Code.CANCELLED
    reason = "CANCELLED"


class DeadlineExceeded(KvloomError):
    """No answer within the deadline."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
    retryable = True


class Internal(KvloomError):
    """A fault of ours."""

    code = Code.INTERNAL
    reason = "INTERNAL"


class ConfigRefused(KvloomError):
    """A configuration that breaks a law, or two peers that do not fit together."""

    code = Code.FAILED_PRECONDITION
    reason = "CONFIG_REFUSED"


class Stale(KvloomError):
    """The caller speaks of something that has been replaced since: another attempt, epoch, instance or owner."""

    code = Code.ABORTED
    reason = "STALE"


class LeaseEnded(KvloomError):
    """What was leased is no longer held for the caller."""

    code = Code.FAILED_PRECONDITION
    reason = "LEASE_ENDED"


class PortInUse(KvloomError):
    """Nothing can listen on this address."""

    code = Code.FAILED_PRECONDITION
    reason = "PORT_IN_USE"

    def __init__(self, host: str, port: int, why: str = "the port is in use") -> None:
        super().__init__(f"cannot listen on {join_address(host, port)}: {why}")


# The order decides which class stands for a status code that comes without details.
TABLE: tuple[type[KvloomError], ...] = (
    InvalidRequest,
    Duplicate,
    Unknown,
    MessageTooLarge,
    Exhausted,
    Unavailable,
    Cancelled,
    DeadlineExceeded,
    ConfigRefused,
    Stale,
    LeaseEnded,
    PortInUse,
    Internal,
)
_BY_REASON = {cls.reason: cls for cls in TABLE}
_BY_CODE = {cls.code: cls for cls in reversed(TABLE)}


def shorten(value: object) -> str:
    """Text of a value for a message: at most MAX_SHOWN characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def to_status(error: KvloomError) -> status_pb2.Status:
    """The rich status of an error."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    details: list[any_pb2.Any] = [_packed(info)]
    if isinstance(error, InvalidRequest):
        info.metadata["value"] = error.value
        details = [_packed(info), _packed(_violation(error.field, error.limit))]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_packed(retry))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends a servicer call with the status of `error`; what is no KvloomError is answered as Internal, by its type alone.

    The text of a foreign exception may hold paths or addresses, so it stays in the log.
    """
    known = error if isinstance(error, KvloomError) else Internal(f"internal error ({type(error).__name__})")
    status = rpc_status.to_status(to_status(known))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("context.abort returned")


def from_rpc_error(error: grpc.RpcError) -> KvloomError:
    """The exception behind a failed call, of either API; the inverse of `to_status`."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The details contradict the status line: believe the status line.
        status = None
    if status is None:
        return _from_code(error.code(), error.details() or "")
    return from_status(status)


def from_status(status: status_pb2.Status) -> KvloomError:
    """Rebuilds the error from its rich status."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    cls = _BY_REASON.get(info.reason)
    if cls is None:
        code = next((code for code in Code if code.value[0] == status.code), Code.UNKNOWN)
        return _from_code(code, status.message)
    retry_after_s = retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None
    error = _bare(cls, status.message, retry_after_s)
    error.is_told = True
    if isinstance(error, InvalidRequest) and bad.field_violations:
        violation = bad.field_violations[0]
        error.field, error.limit, error.value = violation.field, violation.description, info.metadata["value"]
    return error


def _from_code(code: grpc.StatusCode, message: str) -> KvloomError:
    cls = _BY_CODE.get(code)
    if cls is not None:
        return _bare(cls, message or code.name, None)
    return _bare(Internal, f"{code.name}: {message}", None)


def _bare(cls: type[KvloomError], message: str, retry_after_s: float | None) -> KvloomError:
    """An instance with the received message, whatever the constructor of its class would compose."""
    error = cls.__new__(cls)
    KvloomError.__init__(error, message, retry_after_s=retry_after_s)
    if isinstance(error, InvalidRequest):
        error.field = error.value = error.limit = ""
    return error


def _violation(field: str, limit: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=limit)
    return error_details_pb2.BadRequest(field_violations=[violation])


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
