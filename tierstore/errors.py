"""The exception tree. Every error that leaves the package is one of these.

    TierstoreError
    ├── InvalidInput (ValueError)      the caller sent something wrong; nothing was changed
    │   ├── SnapshotError              a snapshot that may not be loaded: names file, row and reason
    │   │   └── LoadCancelled          a load that was cancelled
    │   ├── DeltaError                 a delta that may not be applied
    │   ├── WrongPartition             a look-up of a key that is in a partition of another node
    │   └── ConfigError                a setting that is unknown or has no meaning
    ├── NotFound (LookupError)         no such model, version, feature, job
    ├── Conflict                       a request that contradicts what is stored
    │   ├── Fenced                     another node has taken over what this one writes
    │   └── SequenceGap                a delta that is not the next one; `expected_seq` says which is
    ├── TooLarge (ValueError)          beyond a configured size
    ├── Overloaded                     a bound is reached; `retry_after_s` says when to try again
    │   └── RateLimited                a caller, or a model, has had what it may in a second
    ├── DeadlineExceeded (TimeoutError) the caller's deadline passed before there was an answer
    ├── NotReady                       it exists, but cannot answer yet
    ├── Locked                         the data directory is held by another process
    ├── Closed                         the store was closed
    ├── Forbidden (PermissionError)    the service does not let this caller do that
    │   └── Unauthorized               the service does not know this caller: no token, or not a good one
    ├── Unreachable (ConnectionError)  no service answers at that address
    ├── RolloutFailed                  a rollout was stopped; `restored` says whether every node
        serves what it served before
    ├── MissingExtra (ImportError)     an optional dependency is not installed
    └── StorageError (OSError)         the disk or its driver failed
        ├── Corruption                 bytes read back are not those written
        ├── DiskFull                   there is no room to write; what is stored can be read
        ├── RemoteUnavailable          a cluster, a server of it, or nodes upstream did not answer
        └── InferenceError             ONNX Runtime failed for a reason other than the request
            └── RunLimit               a run of the dense part was ended: it took too long, or the service stops

Each class says its status over HTTP and over gRPC: the service answers by these, and the client tells by them what it
was answered. Nothing else in the package uses a status code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

# Outcomes of requests (the label in metrics) that speak against the version, or the service, that had them.
# What a caller does wrong does not, nor what it may not have, nor the deadline that it sets, nor that there
# are more requests than are taken.
FAULTS = frozenset({"error", "unavailable"})


NO_VERSION = 0  # in place of a version's number: the request found no version that is served


def explained(error: BaseException) -> str:
    """The message of an error, with the notes that were added to it."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def shown(value: object) -> str:
    """`value` for an error message: short, whatever a caller sent."""
    try:
        text = repr(value)
    except RecursionError:  # JSON parsers nest deeper than Python can show
        return f"{type(value).__name__} that is nested too deep"
    except ValueError:  # an integer of too many digits
        return f"{type(value).__name__} that is too large to show"
    return text if len(text) <= 80 else text[:77] + "…"


class TierstoreError(Exception):
    """Root of the tree; catch it to catch all of tierstore's own errors.

    `version` is the version of the model that the request was for, or `NO_VERSION`, if the service knows it.
    `request_id` is set on errors of requests that a client sent: the service's log lines have it as `id`.
    """

    http_status = 500
    grpc_status = "INTERNAL"  # the name of a status code, as grpcio may not be installed
    version: int | None = None
    request_id: str | None = None

    def with_request_id(self, request_id: str | None) -> Self:
        """Set the request's id, unless it has one, and add it as a note. Returns the error."""
        if request_id is not None and self.request_id is None:
            self.request_id = request_id
            self.add_note(f"request id {request_id}")
        return self


class InvalidInput(TierstoreError, ValueError):
    """Bad input. The message says what was expected, what it got, and what to do."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class SnapshotError(InvalidInput):
    """A snapshot that is refused.

    Attributes: `file` (path within the snapshot, or None), `row` (0-based row in that file, or
    None), `reason`.
    """

    def __init__(self, reason: str, *, file: str | None = None, row: int | None = None) -> None:
        self.reason, self.file, self.row = reason, file, row
        where = "" if file is None else f"{file}: " if row is None else f"{file}, row {row}: "
        super().__init__(where + reason)


class LoadCancelled(SnapshotError):
    """A load that its caller has cancelled."""


class DeltaError(InvalidInput):
    """A delta that is refused as a whole."""


class WrongPartition(InvalidInput):
    """A look-up of a key in a partition that this node does not have. Another node knows
    whether the key exists (HTTP 421).
    """

    http_status = 421
    grpc_status = "OUT_OF_RANGE"


class ConfigError(InvalidInput):
    """A setting that is unknown, malformed, or contradicts another one."""


class NotFound(TierstoreError, LookupError):
    """No model, version, table, feature or job of that name."""

    http_status = 404
    grpc_status = "NOT_FOUND"


def unknown_model(name: str, there: Iterable[str]) -> NotFound:
    """The error for a model that is not among those `there`."""
    return NotFound(f"no model {name!r}; there is {', '.join(sorted(there)) or 'none yet'}")


class Conflict(TierstoreError):
    """The request contradicts what is stored."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class Fenced(Conflict):
    """A write under an epoch below `epoch`: another node is the ingester now. Nothing was written."""

    def __init__(self, message: str, *, epoch: int = 0) -> None:
        super().__init__(message)
        self.epoch = epoch


class SequenceGap(Conflict):
    """A delta that is not the next one. `expected_seq` is the next one."""

    def __init__(self, message: str, *, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class TooLarge(TierstoreError, ValueError):
    """Larger than a configured limit."""

    http_status = 413
    grpc_status = "INVALID_ARGUMENT"


class Overloaded(TierstoreError):
    """A bound (queue, overlay bytes) is reached; try again after `retry_after_s` seconds."""

    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller, or all callers of the model together, have used up their rate; try again
    after `retry_after_s` seconds.
    """

    http_status = 429


class DeadlineExceeded(TierstoreError, TimeoutError):
    """The caller's deadline passed.

    From the service: it passed while the request waited, so no work was done for it.
    """

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class NotReady(TierstoreError):
    """It exists, but it cannot answer yet."""

    http_status = 400
    grpc_status = "UNAVAILABLE"


class Locked(TierstoreError):
    """The data directory is open in another process. `url`: where that serves it, if it does."""

    http_status = 503
    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, *, url: str | None = None) -> None:
        super().__init__(message)
        self.url = url


class Closed(TierstoreError):
    """The store, or the version, was closed."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class Forbidden(TierstoreError, PermissionError):
    """The caller may not do this (HTTP 403)."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class Unauthorized(Forbidden):
    """The service does not know the caller: the token is missing or invalid (HTTP 401)."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Unreachable(TierstoreError, ConnectionError):
    """No service answers at that address, or it went away before it answered."""


class RolloutFailed(TierstoreError):
    """A rollout was stopped.

    `restored`: every node serves what it served before; otherwise the message names those that do not.
    """

    def __init__(self, message: str, *, restored: bool) -> None:
        super().__init__(message)
        self.restored = restored


class MissingExtra(TierstoreError, ImportError):
    """An optional dependency is missing. The message names the extra to install."""

    http_status = 400
    grpc_status = "FAILED_PRECONDITION"


class StorageError(TierstoreError, OSError):
    """The disk, or the driver of the engine on it, failed.

    `keys`: the codes that could not be read, if the failure is about some keys of a batch.
    """

    http_status = 503
    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, *, keys: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.keys: Sequence[int] = keys


class DiskFull(StorageError):
    """There is no room to write. What is stored can be read."""


class RemoteUnavailable(StorageError):
    """Machines that have the rows, a cluster or nodes upstream, did not answer in time or lack what they should
    have; `keys` as in StorageError.
    """


class InferenceError(StorageError):
    """The dense part could not be run, for a reason other than the request."""


class RunLimit(InferenceError):
    """A run of the dense part was ended: it took longer than `dense_timeout_s`, or the service stops."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Corruption(StorageError):
    """Bytes read back differ from those that were written."""
