"""What calls raise: each carries `.code` (gRPC status), `.reason`, `.retryable` and `.retry_after_s`."""

from cp_wire.errors import (
    Cancelled,
    ConfigRefused,
    DeadlineExceeded,
    Duplicate,
    Exhausted,
    Internal,
    InvalidRequest,
    KvloomError,
    MessageTooLarge,
    Unavailable,
    Unknown,
)

__all__ = [
    "Cancelled",
    "ConfigRefused",
    "DeadlineExceeded",
    "Duplicate",
    "Exhausted",
    "Internal",
    "InvalidRequest",
    "KvloomError",
    "MessageTooLarge",
    "Unavailable",
    "Unknown",
]
