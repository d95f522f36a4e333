"""Numba kernels: arrays and scalars in, arrays out.

Kernels of rows lie here, others beside the Python that calls them: `PARTS` says where.

numba keeps compiled kernels on disk. To find out whether one is out of date it looks only at the kernel's own source file
(its modification time, since 0.68 its content), but kernels inline helpers from other files. So the stamp that numba
compares holds the content of all `PARTS`: after an edit, or an upgrade, every kernel is compiled again and never runs
with an old helper inside.

This module also chooses where compiled kernels are kept: the first directory that can be written, or one that holds all
kernels for this machine and version already: `carried.py` says which come with the package. Where all are there, `compiled` reads
each from there at import. Else it is compiled at its first call; `ahead.py` has other processes compile them meanwhile.

Several processes may compile the same kernel at once. Files of other sources, versions or processors have other names, and
each process compiles the signatures of a kernel in the same order. So a file has the same code, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numba
from numba.core import caching, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from tierstore.errors import StorageError
from tierstore.kernels import carried

log = logging.getLogger(__name__)

# packages and modules of this package that have kernels, or what kernels inline
PARTS = (
    "kernels",
    "wire",
    "lookup",
    "reactor",
    "tiers.host.cache",
    "tiers.disk.bloom",
    "tiers.disk.layout",
    "tiers.disk.sealed_blocks",
    "tiers.disk.sealed_rows",
    "tiers.device.driver_calls",
    "tiers.device.round_trip",
    "tiers.device.staging",
    "tiers.ssd.index",
    "tiers.upstream.layout",
    "tiers.upstream.reads",
)

_FOLDER = Path(__file__).parent  # where compiled kernels are kept if it can be written
_PACKAGE = _FOLDER.parent
KERNELS = "kernels"  # within a data directory
_CACHE_VARIABLE = "NUMBA_CACHE_DIR"
# when a kernel is needed: for any look-up; for what changes rows, or makes look-ups faster; for reactors over HTTP/1.1; for HTTP/2
# and gRPC, for nodes in front, and for rows that are elsewhere
FIRST, SOON, HTTP, LAST = range(4)
_data: list[Path] = []  # the data directory, which takes them where nothing else can be written


@lru_cache
def sources(folder: Path = _FOLDER) -> dict[Path, str]:
    """All sources in `folder` and in the folders in it, or of all `PARTS`, with their dotted names below it or below the package."""
    root, parts = (_PACKAGE, PARTS) if folder == _FOLDER else (folder, ("",))
    found: list[Path] = []
    for part in parts:
        place = root.joinpath(*part.split("."))
        found += place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in sorted(found)}


def modules() -> list[str]:
    """The dotted names of all modules of `PARTS`."""
    return [f"tierstore.{name}".removesuffix(".__init__") for name in sources().values()]


@lru_cache
def _digest(folder: Path) -> bytes:
    whole = hashlib.sha256()
    for source, name in sources(folder).items():
        content = source.read_bytes()
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.digest()


def _stamp(folder: Path) -> bytes:
    """Of the sources of `folder`, and of `PARTS`, which others inline."""
    return _digest(folder) + (b"" if folder == _FOLDER else _digest(_FOLDER))


@lru_cache
def _machine(folder: Path) -> carried.Machine:
    """What kernels of `folder` are compiled for: this processor, or what those are for that the package carries."""
    own: carried.Machine = cpu_target.target_context.codegen().magic_tuple()
    common = carried.machine(own[0]) if folder == _FOLDER else None
    return common if common is not None and (carried.FOLDER / _mark(folder, LAST, common)).exists() else own


def _identity(folder: Path, machine: carried.Machine) -> str:
    """Of these sources, this numba and such a processor."""
    return hashlib.sha256(_stamp(folder) + repr((numba.__version__, machine)).encode()).hexdigest()[:32]


def _mark(folder: Path, when: int, machine: carried.Machine | None = None) -> str:
    """The name of the file that says: all kernels up to those of `when` are here, for this Python."""
    return f"complete-{when}-{sys.implementation.cache_tag}-{_identity(folder, machine or _machine(folder))}"


def _places(folder: Path) -> Iterator[Path]:
    """Directories for the kernels of `folder`, the best first."""
    name = f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if named := os.environ.get(_CACHE_VARIABLE):
        yield Path(named).absolute() / name
    yield folder / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "tierstore" / name
    for data in _data[-1:]:
        yield data / KERNELS / name
    yield Path(tempfile.gettempdir()) / f"tierstore-{os.getuid()}" / name


def _is_ours(place: Path) -> bool:
    """Whether `place` and the directory above it are ours or root's, and no others' to write to: what lies there is run."""
    with suppress(OSError):
        stats = [part.stat() for part in (place, place.parent)]
        return all(stat.st_uid in (0, os.getuid()) and not stat.st_mode & 0o002 for stat in stats)
    return False


def _can_write(place: Path) -> bool:
    with suppress(OSError):
        place.mkdir(mode=0o755, parents=True, exist_ok=True)  # others may read what root has compiled
        tempfile.TemporaryFile(dir=place).close()
        return True
    return False


def use_data(data: Path) -> None:
    """Have kernels kept in this data directory if nothing else can be written. Before any of them is imported."""
    _data.append(data.absolute())
    if directory().is_relative_to(_data[-1] / KERNELS):
        os.environ[_CACHE_VARIABLE] = str(_data[-1] / KERNELS)  # processes that this one starts look there as well


@lru_cache
def directory(folder: Path = _FOLDER) -> Path:
    """Where the compiled kernels of `folder` are kept. Raises StorageError where no directory will do."""
    mark = _mark(folder, LAST)
    if folder == _FOLDER and (carried.FOLDER / mark).exists():
        return carried.FOLDER  # trusted as the package's sources are
    places: list[Path] = []
    with suppress(FileNotFoundError):  # of the directory for temporary files: there is none
        places += _places(folder)
    for place in places:
        if (place / mark).exists() and _is_ours(place):
            return place
    for place in places:
        if _can_write(place) and _is_ours(place):
            return place
    raise StorageError(
        f"compiled kernels need a directory that can be written, such as {', '.join(map(str, places[:3]))}; "
        "name one in the variable NUMBA_CACHE_DIR"
    )


def child_environment() -> dict[str, str]:
    """The environment of a process that is to import from where this one does, and, run with `-P`, nothing from its directory.

    In a clone another copy of the package lies there, whose kernels are kept elsewhere.
    """
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def is_complete(when: int = LAST) -> bool:
    """Whether all kernels up to those of `when` are compiled, for this machine and version."""
    return any((directory() / _mark(_FOLDER, level)).exists() for level in range(when, LAST + 1))


def set_complete(when: int = LAST) -> None:
    """Say so, from now on. Files of other versions or machines go."""
    identity = _identity(_FOLDER, _machine(_FOLDER))
    for pattern in ("complete-*", "*.nb[ic]"):
        for file in directory().glob(pattern):
            if identity not in file.name:
                file.unlink(missing_ok=True)
    (directory() / _mark(_FOLDER, when)).touch()


def stamp_caches(folder: Path) -> None:
    """From now on compiled functions of `folder` are kept in its `directory`, until any source there or here changes."""

    class Stamped(caching._CacheLocator):  # type: ignore[misc]
        def __init__(self, py_func: Any, source: str) -> None:
            self._place = f"{source}-{py_func.__code__.co_firstlineno}-{identity}"

        def get_cache_path(self) -> str:
            return str(directory(folder))

        def ensure_cache_path(self) -> None:
            directory(folder)

        def get_source_stamp(self) -> Any:
            return stamp

        def get_disambiguator(self) -> str:
            return self._place  # two modules of one name may each have a kernel of one name

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            name = sources(folder).get(Path(py_file))
            return cls(py_func, name.replace(".", "-")) if name else None

    stamp, identity = _stamp(folder), _identity(folder, _machine(folder))
    caching.CacheImpl._locator_classes.insert(0, Stamped)


stamp_caches(_FOLDER)


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """numba's, of one kernel. A file that is damaged counts as missing; one that cannot be written is not kept."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache.cache_path, cache._impl.filename_base, cache._impl.locator.get_source_stamp())

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:  # noqa: BLE001 - whatever pickle makes of it: cut short by a failure of power, say
            return {}

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)
        except Exception as error:
            raise OSError(f"{name} is damaged: {error}") from error

    def save(self, key: Any, data: Any) -> None:
        if self._cache_path == str(carried.FOLDER):
            return  # what is carried is for other processors too
        try:
            super().save(key, data)
        except OSError as error:
            if must_keep:
                raise
            log.warning("a compiled kernel is not kept in %s: %s", self._cache_path, error)


def _keep(cache: Any) -> None:
    """Have one kernel's cache use `_Files`, and read a kernel without what only a compilation needs.

    numba registers all that a program may call before it reads the first kernel: 0.4 s. A compilation does so itself.
    """

    def load_overload(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)  # which kernels that allocate are linked with
        return cache._load_overload(signature, context)

    index_key = cache._index_key
    cache._index_key = lambda signature, _: index_key(signature, _Target)
    cache._cache_file, cache.load_overload = _Files(cache), load_overload


class _Target:
    """What kernels are compiled for, as numba's index of a kernel asks for it."""

    @staticmethod
    def magic_tuple() -> carried.Machine:
        return _machine(_FOLDER)


must_keep = False  # whether a kernel that cannot be kept is an error; else it is used all the same
awaited = False  # whether other processes compile the kernels of SOON now; look-ups do without those meanwhile

# options of a kernel that neither makes arrays nor returns any. Its caller holds those that it is called with, so references to
# them need not be counted; numba else does so, with atomic instructions, wherever one function calls another
BORROWS = {"_nrt": False}


class Entry(NamedTuple):
    """A kernel that is called from Python, or through its address."""

    when: int
    dispatcher: Any  # numba's
    build: Callable[[], object]  # compile it, or read it from the cache; any thread, any number of times


entries: list[Entry] = []  # of the modules that are imported


def compiled(
    *signatures: Any, when: int = SOON, inner: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(signatures, nogil=True, cache=True)`, but compiled at the first call where it is not in the cache.

    inner: only kernels call it. It is compiled with each of these, and not kept for itself.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, cache=not inner, **options)(function)
        if not inner:
            _keep(dispatcher._cache)
        get_call_template = dispatcher.get_call_template

        def build() -> None:
            with global_compiler_lock:
                if dispatcher._can_compile:
                    for signature in signatures:
                        dispatcher.compile(signature)
                    dispatcher.disable_compile()  # for any other

        def compile_for(*_: Any) -> Any:
            build()
            return dispatcher  # which numba calls then

        def type_call(args: Any, kws: Any) -> Any:
            build()
            return get_call_template(args, kws)

        # numba calls these where it would compile for the types of the arguments: of a call, and in another kernel
        dispatcher._compile_for_args, dispatcher.get_call_template = compile_for, type_call
        if not inner:
            _add(Entry(when, dispatcher, build))
        return dispatcher

    return decorate


class compiled_c:
    """`numba.cfunc(signature, cache=True)`, but compiled when its address is first needed."""

    def __init__(self, signature: Any, when: int = SOON) -> None:
        self._signature, self._when = signature, when

    def __call__(self, function: Callable[..., Any]) -> compiled_c:
        self._function = function
        _add(Entry(self._when, numba.njit(function), lambda: self.address))
        return self

    @cached_property
    def address(self) -> int:
        with global_compiler_lock:
            signature = sigutils.normalize_signature(self._signature)
            callback = cast("Any", CFunc)(self._function, signature, locals={}, options={})
            callback.enable_caching()
            _keep(callback._cache)
            callback.compile()
            self._compiled = callback  # kept: its code is
            return int(callback.address)


def _add(entry: Entry) -> None:
    entries.append(entry)
    if is_complete(entry.when):
        entry.build()


def load(when: int = LAST, module: str | None = None) -> None:
    """Compile kernels that are not, or read them from the cache, up to those of `when`, so that no request waits for it.

    `module`: those of this one alone.
    """
    for entry in entries:
        if entry.when <= when and module in (None, entry.dispatcher.py_func.__module__):
            entry.build()
