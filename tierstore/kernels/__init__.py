"""Numba kernels, compiled functions of arrays and scalars: where they are kept, and when they are compiled.

Kernels on rows are in this package, others beside the Python that calls them: `PARTS` lists all.

numba keeps compiled kernels on disk. To find out whether one is out of date, it looks only at the kernel's own source file (its modification time,
since 0.68 its content), but kernels inline helpers from other files. So the stamp that numba compares covers the content of all `PARTS`: after an
edit or an upgrade every kernel is compiled again, and none runs with an old helper inside.

This module also chooses the directory for compiled kernels: one that already holds all kernels for this machine and version, otherwise the first that
can be written. A wheel may carry compiled kernels (`carried.py`). If all are there, `compiled` reads each at import (a command reads those that it
calls: `at_import`); otherwise a kernel is compiled at its first call, while other processes (`ahead.py`) compile the others.

Several processes may compile the same kernel at once. Files for other sources, versions or processors have other names, and each process compiles the
signatures of a kernel in the same order. So a file has the same code whichever process wrote it.
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

# packages and modules with kernels, or with functions that kernels inline
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
    "tiers.device.reports",
    "tiers.device.round_trip",
    "tiers.device.staging",
    "tiers.ssd.index",
    "tiers.upstream.layout",
    "tiers.upstream.reads",
)

_FOLDER = Path(__file__).parent  # compiled kernels are kept here if it can be written
_PACKAGE = _FOLDER.parent
KERNELS = "kernels"  # a folder in a data directory
_CACHE_VARIABLE = "NUMBA_CACHE_DIR"
# when a kernel is needed: for any look-up; for changes to rows, or for faster look-ups; for reactors over HTTP/1.1; for HTTP/2, gRPC, fronts, and rows
# on other machines
FIRST, SOON, HTTP, LAST = range(4)
_data: list[Path] = []  # the data directory, used where no other directory can be written


@lru_cache
def sources(folder: Path = _FOLDER) -> dict[Path, str]:
    """All source files below `folder`, or of all `PARTS`, with their dotted names relative to it or to the package."""
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
    """A hash of the sources of `folder` and of `PARTS`, which other modules inline."""
    return _digest(folder) + (b"" if folder == _FOLDER else _digest(_FOLDER))


@lru_cache
def _machine(folder: Path) -> carried.Machine:
    """The machine that kernels of `folder` are compiled for: this processor, or the one that the package carries kernels for."""
    own: carried.Machine = cpu_target.target_context.codegen().magic_tuple()
    common = carried.machine(own[0]) if folder == _FOLDER else None
    return common if common is not None and (carried.FOLDER / _mark(folder, LAST, common)).exists() else own


def _identity(folder: Path, machine: carried.Machine) -> str:
    """A name for these sources, this numba and such a processor."""
    return hashlib.sha256(_stamp(folder) + repr((numba.__version__, machine)).encode()).hexdigest()[:32]


def _mark(folder: Path, when: int, machine: carried.Machine | None = None) -> str:
    """The name of the file whose presence says that all kernels up to level `when` are here, for this Python."""
    return f"complete-{when}-{sys.implementation.cache_tag}-{_identity(folder, machine or _machine(folder))}"


def _places(folder: Path) -> Iterator[Path]:
    """Possible directories for the kernels of `folder`, the best first."""
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
    """Whether `place` and its parent belong to this user or root and nobody else may write there: the code in it is run."""
    with suppress(OSError):
        stats = [part.stat() for part in (place, place.parent)]
        return all(stat.st_uid in (0, os.getuid()) and not stat.st_mode & 0o002 for stat in stats)
    return False


def _can_write(place: Path) -> bool:
    with suppress(OSError):
        place.mkdir(mode=0o755, parents=True, exist_ok=True)  # other users may read what root has compiled
        tempfile.TemporaryFile(dir=place).close()
        return True
    return False


def use_data(data: Path) -> None:
    """Allow kernels in this data directory if no other directory can be written. Call it before a kernel is imported."""
    _data.append(data.absolute())
    if directory().is_relative_to(_data[-1] / KERNELS):
        os.environ[_CACHE_VARIABLE] = str(_data[-1] / KERNELS)  # child processes look there too


@lru_cache
def directory(folder: Path = _FOLDER) -> Path:
    """The directory of the compiled kernels of `folder`. Raises StorageError if none is usable."""
    mark = _mark(folder, LAST)
    if folder == _FOLDER and (carried.FOLDER / mark).exists():
        return carried.FOLDER  # trusted as the package's sources are
    places: list[Path] = []
    with suppress(FileNotFoundError):  # there is no directory for temporary files
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
    """The environment for a child process that imports the same packages as this one. Run it with `-P`, so that it imports nothing from its directory.

    In a clone that directory has another copy of the package, with another directory for kernels.
    """
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def is_complete(when: int = LAST) -> bool:
    """Whether all kernels up to level `when` are compiled, for this machine and version."""
    return any((directory() / _mark(_FOLDER, level)).exists() for level in range(when, LAST + 1))


def set_complete(when: int = LAST) -> None:
    """Mark all kernels up to level `when` as compiled. Removes files of other versions or machines."""
    identity = _identity(_FOLDER, _machine(_FOLDER))
    for pattern in ("complete-*", "*.nb[ic]"):
        for file in directory().glob(pattern):
            if identity not in file.name:
                file.unlink(missing_ok=True)
    (directory() / _mark(_FOLDER, when)).touch()


def stamp_caches(folder: Path) -> None:
    """Keep compiled functions of `folder` in its `directory` from now on, valid until a source changes there or here."""

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
    """numba's cache files of one kernel. A damaged file counts as missing; a file that cannot be written is not kept."""

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
            return  # carried kernels serve other processors too
        try:
            super().save(key, data)
        except OSError as error:
            if must_keep:
                raise
            log.warning("a compiled kernel is not kept in %s: %s", self._cache_path, error)


def _keep(cache: Any) -> None:
    """Have a kernel's cache use `_Files`, and load a cached kernel without what only compiling needs.

    Before the first kernel numba registers everything that a program may call, which takes 0.4 s; a compilation does that itself.
    """

    def load_overload(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)  # kernels that allocate are linked with it
        return cache._load_overload(signature, context)

    index_key = cache._index_key
    cache._index_key = lambda signature, _: index_key(signature, _Target)
    cache._cache_file, cache.load_overload = _Files(cache), load_overload


class _Target:
    """The compile target of kernels, in the form that numba's index of a kernel asks for."""

    @staticmethod
    def magic_tuple() -> carried.Machine:
        return _machine(_FOLDER)


must_keep = False  # whether a kernel that cannot be kept is an error; otherwise it is used anyway
at_import = True  # whether kernels that are compiled already are read at import, so that no request waits for one; else at their first call
awaited = False  # whether other processes are compiling the kernels of SOON; look-ups do without those meanwhile

# Options of kernels that neither make arrays nor return any. The caller keeps the arguments alive, so numba need not count references to them; by
# default it does, with atomic instructions, wherever one function calls another.
BORROWS = {"_nrt": False}


class Entry(NamedTuple):
    """A kernel that Python calls, or that is called by its address."""

    when: int
    dispatcher: Any  # numba's
    build: Callable[[], object]  # compiles it, or reads it from the cache; any thread, any number of times


entries: list[Entry] = []  # of all imported modules


def compiled(
    *signatures: Any, when: int = SOON, inner: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(signatures, nogil=True, cache=True)`, but a kernel that is not in the cache is compiled at its first call.

    inner: only kernels call it. It is compiled into each of them, and not kept by itself.
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
                    dispatcher.disable_compile()  # for other signatures

        def compile_for(*_: Any) -> Any:
            build()
            return dispatcher  # numba then calls it directly

        def type_call(args: Any, kws: Any) -> Any:
            build()
            return get_call_template(args, kws)

        # numba calls these where it would compile for the argument types: of a call, and in another kernel
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
            self._compiled = callback  # keeps its code alive
            return int(callback.address)


def _add(entry: Entry) -> None:
    entries.append(entry)
    if at_import and is_complete(entry.when):
        entry.build()


def load(when: int = LAST, module: str | None = None) -> None:
    """Compile all kernels up to level `when`, or read them from the cache, so that no request waits for it.

    `module`: only the kernels of this module.
    """
    for entry in entries:
        if entry.when <= when and module in (None, entry.dispatcher.py_func.__module__):
            entry.build()
