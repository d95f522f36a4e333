"""The protocol's system shared memory extension: tensors in regions that a client on this machine has made.

Any thread may use `Regions`. A region is read and written through its file, never mapped: a client that shrinks its
file would end a process that maps it, and gets an error here. After a crash clients register again.

A region belongs to the principal that has registered it: other principals, except admins of all models, do not see it,
and they cannot register its object under another name.

A client may name any object of POSIX shared memory that the service's user may open. Hence the setting
`allow_client_shm`, the refusal of links and of names that lead elsewhere, and of clients that are not on this machine.
"""

from __future__ import annotations

import os
import stat
import threading
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tierstore.access.roles import LOCAL, NOBODY, Principal, Role
from tierstore.errors import Forbidden, InvalidInput, NotFound, Overloaded, TooLarge, shown
from tierstore.service.dataplane.plan import OutputSpec
from tierstore.service.dataplane.tensors import wire_bytes

DIRECTORY = Path("/dev/shm")
MAX_REGIONS = 1024
MOST_EACH = 128  # of one principal, except an admin of all models: one caller must not use up all of them
OWN_PREFIX = "tierstore"  # of objects that this service makes there for itself
_MAX_NAME = 255
_DISABLED = (
    "shared memory is not enabled on this server: send the tensor's data in the request, or start it with "
    "allow_client_shm"
)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + nbytes) of a region, with a tensor or room for one."""

    region: str
    offset: int
    nbytes: int


class _File:
    """The bytes of a region. An error is InvalidInput, because the client has caused it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for every descriptor of an object, whatever its name, while it is open."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def read(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        got = 0
        while got < len(data):
            count = os.preadv(self._descriptor, [data[got:].data], at + got)
            if not count:
                raise InvalidInput("it has shrunk since it was registered")
            got += count

    def write(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        # a file that shrank is not made larger again: that is its client's choice
        if self.size < at + len(data):
            raise InvalidInput("it has shrunk since it was registered")
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:].data, at + done)
        except OSError as error:
            raise InvalidInput(f"it cannot be written: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._descriptor)


class _Region:
    """A registered part of an object. `users` and `dropped` are guarded by the registry's lock."""

    def __init__(self, name: str, key: object, offset: int, nbytes: int, file: _File, owner: str) -> None:
        self.name, self.offset, self.nbytes, self.file, self.owner = name, offset, nbytes, file, owner
        self.identity = file.identity
        self.document = {"name": name, "key": key, "offset": offset, "byte_size": nbytes}
        self.users = 0
        self.dropped = False


class _Use:
    """One use of a region; the last use of a dropped region closes its file. (A class, as a generator costs more.)"""

    __slots__ = ("_lock", "_region")

    def __init__(self, lock: threading.Lock, region: _Region) -> None:
        self._lock, self._region = lock, region

    def __enter__(self) -> _Region:
        return self._region

    def __exit__(self, *_: object) -> None:
        region = self._region
        with self._lock:
            region.users -= 1
            if region.dropped and not region.users:
                region.file.close()


class Regions:
    """The regions that clients have registered, at most MAX_REGIONS, as one principal sees them: at first nobody, see
    `of`.

    If not `enabled`, every use is InvalidInput.
    """

    def __init__(self, *, enabled: bool, max_read: int) -> None:
        # constant after construction
        self.enabled = enabled
        self._max_read = max_read
        self._lock = threading.Lock()
        self._regions: dict[str, _Region] = {}  # guarded by _lock
        self._principal = NOBODY
        self._latest = self  # as the latest caller sees them, who often is the next one

    def of(self, principal: Principal) -> Regions:
        """The same regions as `principal` sees them."""
        view = self._latest
        if view._principal is not principal:
            view = copy(self)
            view._principal, view._latest = principal, view
            self._latest = view
        return view

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, name: str, key: object, offset: object, nbytes: object, *, on_host: bool) -> None:
        """Open the object `key` and register its bytes [offset, offset + nbytes) as `name`.

        `on_host`: the client is on this machine; Forbidden for others. InvalidInput for a name that is
        in use, an object that is missing, too small or another principal's; Overloaded beyond
        MAX_REGIONS, or MOST_EACH of one principal.
        """
        self._check_client(on_host)
        _check_numbers(name, offset=offset, byte_size=nbytes)
        assert isinstance(offset, int)
        assert isinstance(nbytes, int)
        with self._lock:
            self._check_room(name)
        file = _File(_open(name, key))
        try:
            if nbytes == 0 or offset + nbytes > file.size:
                raise InvalidInput(
                    f"region {shown(name)}: {shown(key)} has {file.size} bytes, expected at least one and all within "
                    f"it; got offset {offset} and byte_size {nbytes}"
                )
            self._add(_Region(name, key, offset, nbytes, file, self._principal.name))
        except BaseException:
            file.close()
            raise

    def _add(self, region: _Region) -> None:
        with self._lock:
            self._check_room(region.name)
            self._check_object(region)
            self._regions[region.name] = region

    def unregister(self, name: str | None = None) -> None:
        """Unregister a region, or all regions; a missing one is no error. Requests in progress finish."""
        with self._lock:
            names = [each for each in (self._regions if name is None else [name]) if self._has(each)]
            dropped = [self._regions.pop(each) for each in names]
            for region in dropped:
                region.dropped = True
                if not region.users:
                    region.file.close()

    def close(self) -> None:
        """Unregister all regions of all principals."""
        self.of(LOCAL).unregister()

    def _has(self, name: str) -> bool:
        """Whether there is such a region for the principal."""
        region = self._regions.get(name)
        return region is not None and self._may_use(region)

    def _may_use(self, region: _Region) -> bool:
        return region.owner == self._principal.name or self._has_all

    @property
    def _has_all(self) -> bool:
        return self._principal.role is Role.ADMIN and self._principal.models is None

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """The protocol's entry of one region, or of all. NotFound for one that is not registered."""
        self._check_enabled()
        with self._lock:
            if name is None:
                return [region.document for name, region in self._regions.items() if self._has(name)]
            return [self._find(name).document]

    def check(self, span: Span, what: str) -> None:
        """InvalidInput or NotFound unless `span`, of the tensor `what`, is within a registered region."""
        with self._lock:
            self._within(span, what)

    def read(self, span: Span, what: str) -> memoryview:
        """A copy of the bytes of `span`, aligned for every datatype."""
        if span.nbytes > self._max_read:
            raise TooLarge(f"{what}: takes {span.nbytes} bytes, {self._max_read} are allowed")
        data = np.empty(span.nbytes, np.uint8)
        with self._using(span, what) as region:
            try:
                region.file.read(region.offset + span.offset, data)
            except InvalidInput as error:
                raise InvalidInput(f"{what}: region {shown(region.name)}: {error}") from error
        return data.data

    def write(self, span: Span, data: npt.NDArray[np.uint8]) -> None:
        """Write all of `data`, no longer than `span`, to its place."""
        what = f"{len(data)} bytes of an output"
        with self._using(span, what) as region:
            try:
                region.file.write(region.offset + span.offset, data)
            except InvalidInput as error:
                raise InvalidInput(f"{what}: region {shown(region.name)}: {error}") from error

    def _using(self, span: Span, what: str) -> _Use:
        """A context with the region of `span`, whose file stays open during the block."""
        with self._lock:
            region = self._within(span, what)
            region.users += 1
        return _Use(self._lock, region)

    def _within(self, span: Span, what: str) -> _Region:
        self._check_enabled()
        region = self._find(span.region)
        if span.offset + span.nbytes > region.nbytes:
            raise InvalidInput(
                f"{what}: bytes {span.offset} to {span.offset + span.nbytes} are beyond the {region.nbytes} bytes of "
                f"region {shown(region.name)}"
            )
        return region

    def _find(self, name: str) -> _Region:
        if not self._has(name):
            raise NotFound(f"no shared memory region {shown(name)} is registered")
        return self._regions[name]

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise InvalidInput(_DISABLED)

    def _check_client(self, on_host: bool) -> None:
        self._check_enabled()
        if not on_host:
            raise Forbidden(
                "shared memory is for clients on this machine: expected a connection over loopback or a unix socket, "
                "such as to 127.0.0.1; over a network send the tensor's data in the request"
            )

    def _check_object(self, new: _Region) -> None:
        for region in self._regions.values():
            if region.identity == new.identity and not self._may_use(region):
                raise InvalidInput(
                    f"region {shown(new.name)}: its shared memory object is registered by another caller: choose "
                    "another object"
                )

    def _check_room(self, name: str) -> None:
        if name in self._regions:
            remedy = "unregister it first" if self._has(name) else "by another caller: choose another name"
            raise InvalidInput(f"region {shown(name)} is registered already; {remedy}")
        if len(self._regions) >= MAX_REGIONS:
            raise Overloaded(f"{MAX_REGIONS} regions are registered already; unregister some")
        owner = self._principal.name
        if not self._has_all and sum(region.owner == owner for region in self._regions.values()) >= MOST_EACH:
            raise Overloaded(f"{owner} has registered {MOST_EACH} regions already; unregister some")


class CudaRegions:
    """The protocol's CUDA shared memory, which is not served.

    Status and unregister are answered: benchmarks always send them.
    """

    @staticmethod
    def register(name: str) -> NoReturn:
        raise InvalidInput(f"region {shown(name)}: CUDA shared memory is not served: register system shared memory")

    @staticmethod
    def unregister(name: str | None = None) -> None:
        """Do nothing: no region can be registered."""

    @staticmethod
    def status(name: str | None = None) -> list[dict[str, Any]]:
        """The regions: none. NotFound for one by name."""
        if name is not None:
            raise NotFound(f"no CUDA shared memory region {shown(name)} is registered")
        return []


def check_outputs(spans: list[tuple[int, Span]], specs: list[OutputSpec], regions: Regions) -> None:
    """InvalidInput if an output does not fit its span; `spans` are (position among `specs`, span)."""
    for i, target in spans:
        spec = specs[i]
        regions.check(target, f"output {shown(spec.name)}")
        _check_fits(target, spec, spec.nbytes)


def write_output(target: Span, spec: OutputSpec, array: npt.NDArray[Any], regions: Regions) -> None:
    """Write an output, whose size may have been unknown before, to its span. InvalidInput if it does not fit."""
    data = wire_bytes(array)
    _check_fits(target, spec, data.nbytes)
    regions.write(target, data)


def _check_fits(target: Span, spec: OutputSpec, nbytes: int) -> None:
    if target.nbytes < nbytes:
        raise InvalidInput(
            f"output {shown(spec.name)}: takes {nbytes} bytes, shared_memory_byte_size is {target.nbytes}"
        )


def _check_numbers(name: str, **numbers: object) -> None:
    if not name or len(name) > _MAX_NAME:
        raise InvalidInput(f"a region's name has 1 to {_MAX_NAME} characters, got {shown(name)}")
    for what, value in numbers.items():
        if type(value) is not int or value < 0:
            raise InvalidInput(f"region {shown(name)}: {what} is {shown(value)}, expected a number of bytes")


def _open(name: str, key: object) -> int:
    """A descriptor of the shared memory object `key`: a plain file directly under DIRECTORY, no link, and not the
    service's own.
    """
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
