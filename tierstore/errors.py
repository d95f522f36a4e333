"""The exception tree. Every error that leaves the package is one of these.

    TierstoreError
    ├── InvalidInput (ValueError)      the caller sent something wrong; nothing was changed
    │   ├── SnapshotError              a snapshot that may not be loaded: names file, row and reason
    │   │   └── LoadCancelled          a load that was told to stop
    │   ├── DeltaError                 a delta that may not be applied
    │   └── ConfigError                a setting that is unknown or has no meaning
    ├── NotFound (LookupError)         no such model, version, feature, job
    ├── Conflict                       a request at odds with what is stored
    │   └── SequenceGap                a delta out of turn; `expected_seq` says which is next
    ├── TooLarge (ValueError)          beyond a configured size
    ├── Overloaded                     a bound is reached; `retry_after_s` says when to come back
    ├── DeadlineExceeded (TimeoutError) the caller's deadline passed before the answer was there
    ├── NotReady                       known, but not able to answer yet
    ├── Locked                         the data directory is held by another process
    ├── Closed                         the store was closed
    ├── Forbidden (PermissionError)    the service does not let this caller do that
    ├── Unreachable (ConnectionError)  no service answers at that address
    ├── MissingExtra (ImportError)     an optional dependency is not installed
    └── StorageError (OSError)         the disk or its driver failed
        ├── Corruption                 bytes read back are not those written
        ├── DiskFull                   there is no room to write; what is there can be read
        └── InferenceError             ONNX Runtime failed, and not by what the caller sent

Transports map these to their own codes (`service/`); nothing below knows a status code.
"""

from __future__ import annotations

from collections.abc import Sequence


def explained(error: BaseException) -> str:
    """The message of an error, with the notes that were added on its way."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


class TierstoreError(Exception):
    """Root of the tree; catch it to catch all of tierstore's own errors.

    `version` is the version of a model that the request had been given to, where the service knows it.
    """

    version: int | None = None


class InvalidInput(TierstoreError, ValueError):
    """Bad input. The message says what was expected, what came, and what to do."""


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
    """A load that its caller has told to stop."""


class DeltaError(InvalidInput):
    """A delta that is refused whole."""


class ConfigError(InvalidInput):
    """A setting that is unknown, malformed, or at odds with another."""


class NotFound(TierstoreError, LookupError):
    """No model, version, table, feature or job of that name."""


class Conflict(TierstoreError):
    """The request is at odds with what is stored."""


class SequenceGap(Conflict):
    """A delta that is not next in line. `expected_seq` is the one that is."""

    def __init__(self, message: str, *, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


class TooLarge(TierstoreError, ValueError):
    """Beyond a configured size limit."""


class Overloaded(TierstoreError):
    """A bound (queue, overlay bytes) is reached; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TierstoreError, TimeoutError):
    """The caller's deadline passed. From the service: while the request waited, so no work was done for it."""


class NotReady(TierstoreError):
    """Known, but not able to answer yet."""


class Locked(TierstoreError):
    """The data directory is open in another process."""


class Closed(TierstoreError):
    """The store, or the version, was closed."""


class Forbidden(TierstoreError, PermissionError):
    """The caller is not who it has to be, or may not do this (HTTP 401 and 403)."""


class Unreachable(TierstoreError, ConnectionError):
    """No service answers at that address, or it went away before it answered."""


class MissingExtra(TierstoreError, ImportError):
    """An optional dependency is missing. The message names the extra to install."""


class StorageError(TierstoreError, OSError):
    """The disk, or the driver of the engine on it, failed.

    `keys` holds the codes that could not be read, where the failure concerns some keys of a batch.
    """

    def __init__(self, message: str, *, keys: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.keys: Sequence[int] = keys


class DiskFull(StorageError):
    """There is no room for what was to be written. What is there already can be read."""


class InferenceError(StorageError):
    """The dense part could not be run, for a reason that does not lie in the request."""


class Corruption(StorageError):
    """Bytes read back differ from those that were written."""
