"""The protocol's system shared memory extension: tensors in regions that a client on this machine has made.

Any thread may use `Regions`. A region is read and written through its file, never mapped: a client that shrinks its file
would end a process that has it mapped, and gets an error here. Nothing survives a crash; clients register again.

A client names any object of POSIX shared memory that the service's user may open, hence the setting `allow_client_shm`,
and the refusal of links and of names that lead elsewhere.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput, NotFound, Overloaded, TooLarge
from tierstore.service.tensors import shown

DIRECTORY = Path("/dev/shm")
MAX_REGIONS = 1024
OWN_PREFIX = "tierstore"  # of what this program makes there for itself
_MAX_NAME = 255
_DISABLED = "system shared memory is not enabled on this server: send the tensor's data in the request, or start it with allow_client_shm"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + nbytes) of a region: where a tensor lies, or may be written."""

    region: str
    offset: int
    nbytes: int


class _Region:
    """A registered part of an object. `users` and `dropped` are guarded by the registry's lock."""

    def __init__(self, name: str, key: str, offset: int, nbytes: int, descriptor: int) -> None:
        self.name, self.key, self.offset, self.nbytes, self.descriptor = name, key, offset, nbytes, descriptor
        self.users = 0
        self.dropped = False

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.nbytes}


class _Use:
    """One use of a region; the last one of a region that was dropped closes its file. (A class: a generator costs more.)"""

    __slots__ = ("_lock", "_region")

    def __init__(self, lock: threading.Lock, region: _Region) -> None:
        self._lock, self._region = lock, region

    def __enter__(self) -> _Region:
        return self._region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._region
        with self._lock:
            region.users -= 1
            if region.dropped and not region.users:
                os.close(region.descriptor)


class Regions:
    """The regions that clients have registered, at most MAX_REGIONS. Where not `enabled`, every use is InvalidInput."""

    def __init__(self, *, enabled: bool, max_read: int) -> None:
        # constant after construction
        self.enabled = enabled
        self._max_read = max_read
        self._lock = threading.Lock()
        self._regions: dict[str, _Region] = {}  # guarded by _lock

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, name: str, key: object, offset: object, nbytes: object) -> None:
        """Open the object `key` and know its bytes [offset, offset + nbytes) as `name`.

        InvalidInput for a name that is taken, an object that is not there or too small; Overloaded beyond MAX_REGIONS.
        """
        self._check_enabled()
        if not name or len(name) > _MAX_NAME:
            raise InvalidInput(f"a region's name has 1 to {_MAX_NAME} characters, came {shown(name)}")
        for what, value in (("offset", offset), ("byte_size", nbytes)):
            if type(value) is not int or value < 0:
                raise InvalidInput(f"region {shown(name)}: {what} is {shown(value)}, expected a number of bytes")
        assert isinstance(offset, int)
        assert isinstance(nbytes, int)
        with self._lock:
            self._check_room(name)
        descriptor = _open(name, key)
        try:
            size = os.fstat(descriptor).st_size
            if nbytes == 0 or offset + nbytes > size:
                raise InvalidInput(
                    f"region {shown(name)}: {shown(key)} has {size} bytes, expected at least one and all within it; "
                    f"came offset {offset} and byte_size {nbytes}"
                )
            with self._lock:
                self._check_room(name)
                self._regions[name] = _Region(name, str(key), offset, nbytes, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all of them; one that is not known is none the less forgotten. Requests in progress finish."""
        with self._lock:
            names = list(self._regions) if name is None else [name]
            dropped = [region for each in names if (region := self._regions.pop(each, None)) is not None]
            for region in dropped:
                region.dropped = True
                if not region.users:
                    os.close(region.descriptor)

    close = unregister

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """The protocol's entry of one region, or of all. NotFound for one that is not registered."""
        self._check_enabled()
        with self._lock:
            if name is None:
                return [region.document() for region in self._regions.values()]
            return [self._find(name).document()]

    def check(self, span: Span, what: str) -> None:
        """InvalidInput or NotFound where `span`, of the tensor `what`, is not within a registered region."""
        with self._lock:
            self._within(span, what)

    def read(self, span: Span, what: str) -> memoryview:
        """A copy of the bytes of `span`, which start at an address that suits every datatype."""
        if span.nbytes > self._max_read:
            raise TooLarge(f"{what}: takes {span.nbytes} bytes, {self._max_read} are allowed")
        with self._using(span, what) as region:
            data = np.empty(span.nbytes, np.uint8)
            got = 0
            while got < span.nbytes:
                count = os.preadv(region.descriptor, [data[got:].data], region.offset + span.offset + got)
                if not count:
                    raise InvalidInput(f"{what}: region {shown(region.name)} has shrunk since it was registered")
                got += count
        return data.data

    def write(self, span: Span, data: npt.NDArray[np.uint8]) -> None:
        """Write all of `data`, no longer than `span`, to its place."""
        what = f"{len(data)} bytes of an output"
        with self._using(span, what) as region:
            # a region that shrank is not made larger again: its client has other plans for it
            if os.fstat(region.descriptor).st_size < region.offset + span.offset + len(data):
                raise InvalidInput(f"{what}: region {shown(region.name)} has shrunk since it was registered")
            done = 0
            try:
                while done < len(data):
                    done += os.pwrite(region.descriptor, data[done:].data, region.offset + span.offset + done)
            except OSError as error:
                raise InvalidInput(
                    f"{what}: region {shown(region.name)} cannot be written: {error.strerror}"
                ) from error

    def _using(self, span: Span, what: str) -> _Use:
        """`with` this for the region of `span`, whose file stays open for the length of the block."""
        with self._lock:
            region = self._within(span, what)
            region.users += 1
        return _Use(self._lock, region)

    def _within(self, span: Span, what: str) -> _Region:
        self._check_enabled()
        region = self._find(span.region)
        if span.offset + span.nbytes > region.nbytes:
            raise InvalidInput(
                f"{what}: bytes {span.offset} to {span.offset + span.nbytes} are beyond the {region.nbytes} bytes of region {shown(region.name)}"
            )
        return region

    def _find(self, name: str) -> _Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"no system shared memory region {shown(name)} is registered")
        return region

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise InvalidInput(_DISABLED)

    def _check_room(self, name: str) -> None:
        if name in self._regions:
            raise InvalidInput(f"region {shown(name)} is registered already; unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise Overloaded(f"{MAX_REGIONS} regions are registered already; unregister some")


def _open(name: str, key: object) -> int:
    """A descriptor of the shared memory object `key`: a plain file right under DIRECTORY, no link, not one of our own."""
    if not isinstance(key, str):
        raise InvalidInput(f"region {shown(name)}: key is {shown(key)}, expected the name of a shared memory object")
    file = key.lstrip("/")  # as shm_open does
    if not file or "/" in file or "\0" in file or file in (".", "..") or len(file.encode(errors="replace")) > _MAX_NAME:
        raise InvalidInput(
            f"region {shown(name)}: key {shown(key)} is not the plain name of a shared memory object, such as /input"
        )
    if file.startswith(OWN_PREFIX):
        raise InvalidInput(f"region {shown(name)}: names that begin with {OWN_PREFIX!r} are this server's own")
    try:
        descriptor = os.open(DIRECTORY / file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid text"
        raise InvalidInput(
            f"region {shown(name)}: shared memory object {shown(key)} cannot be opened: {reason}"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidInput(f"region {shown(name)}: {shown(key)} is not a shared memory object")
    return descriptor
