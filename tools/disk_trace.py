"""What a directory may look like after any file operation of a program, killed there or without power there.

`tools/disk_trace.c`, preloaded into a process and its children, records each change of files below one directory: those of
Python, of RocksDB and of load helpers alike. `Disk` plays such a record, and `write` leaves the directory as it may be found:

- `killed`: everything up to an operation has happened. That is what a process leaves that is killed after it.
- `flushed`: only what was flushed is there: a file as of its last fsync, a name as of the last fsync of its directory.
- `torn`: what was flushed, and some of what came after: of each file and of each directory the first few changes, or
  a file's new length with zeros.

One thread. The inode numbers in a record are those of the directory that was recorded.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).with_suffix(".c")
HEAD = struct.Struct("<IHHHHQQQ")
MAGIC = 0x45434152

Mode = Literal["killed", "flushed", "torn"]
MODES: tuple[Mode, ...] = ("killed", "flushed", "torn")


def build(where: Path) -> Path | None:
    """Compile the recorder into the directory `where`; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = where / "disk_trace.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind`: c create, w write, t truncate, s fsync, d fsync of a directory, r rename, l link, u remove, m mkdir."""

    kind: str
    path: str
    second: str
    inode: int
    offset: int
    data: bytes


def operations(path: Path) -> list[Operation]:
    """The operations in a record; one that a kill has cut off, and what comes behind it, is left out."""
    data, at, found = path.read_bytes() if path.exists() else b"", 0, []
    while at + HEAD.size <= len(data):
        magic, kind, first, second, _, inode, offset, size = HEAD.unpack_from(data, at)
        at += HEAD.size
        if magic != MAGIC or at + first + second + size > len(data):
            break
        names = data[at : at + first].decode(), data[at + first : at + first + second].decode()
        at += first + second
        found.append(Operation(chr(kind), *names, inode, offset, data[at : at + size]))
        at += size
    return found


@dataclass(eq=False)
class File:
    """`content` is what programs read; `pending` are the changes since the last flush."""

    content: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # offset and bytes, or a new size

    def change(self, offset: int, data: bytes | None) -> None:
        _apply(self.content, offset, data)
        self.pending.append((offset, data))

    def flush(self, content: bytes) -> None:
        self.content[:] = content
        self.flushed, self.pending = bytes(content), []

    def found(self, mode: Mode, rng: random.Random) -> bytes:
        if mode == "killed":
            return bytes(self.content)
        if mode == "flushed" or not self.pending:
            return self.flushed
        some = bytearray(self.flushed)
        for offset, data in self.pending[: rng.randint(0, len(self.pending))]:
            _apply(some, offset, data)
        if rng.random() < 0.3:  # the length has come to the disk, the blocks have not
            some[len(self.flushed) :] = bytes(max(0, len(some) - len(self.flushed)))
        return bytes(some)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    end = offset if data is None else offset + len(data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset:end] = data


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, File | Folder | None]] = field(default_factory=list)

    def change(self, name: str, node: File | Folder | None) -> None:
        _name(self.names, name, node)
        self.pending.append((name, node))

    def flush(self) -> None:
        self.flushed, self.pending = dict(self.names), []

    def found(self, mode: Mode, rng: random.Random) -> dict[str, File | Folder]:
        if mode == "killed":
            return self.names
        names = dict(self.flushed)
        if mode == "torn":
            for name, node in self.pending[: rng.randint(0, len(self.pending))]:
                _name(names, name, node)
        return names


def _name(names: dict[str, File | Folder], name: str, node: File | Folder | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class Disk:
    """A directory as it is at the beginning, all of it flushed; `play` has operations happen to it."""

    def __init__(self, root: Path) -> None:
        self._root, self._inodes = root, dict[int, File | Folder]()
        self.top = self._read(root)

    def _read(self, path: Path) -> Folder:
        folder = Folder()
        self._inodes[path.stat().st_ino] = folder
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                folder.names[entry.name] = self._read(Path(entry.path))
            else:
                node = self._inodes.get(entry.inode())
                if not isinstance(node, File):
                    self._inodes[entry.inode()] = node = File()
                    node.flush(Path(entry.path).read_bytes())
                folder.names[entry.name] = node
        folder.flush()
        return folder

    def numbers(self, history: list[Operation], wanted: Callable[[str], bool]) -> list[int]:
        """Which operations are on a file or directory whose path is `wanted`: the one it had here, was made with, or gets."""
        here = {id(node): path for path, node in _walk(self.top, str(self._root))}
        inodes, numbers = {inode for inode, node in self._inodes.items() if wanted(here.get(id(node), ""))}, []
        for number, operation in enumerate(history):
            named = any(wanted(path) for path in (operation.path, operation.second))
            if named and operation.inode:
                inodes.add(operation.inode)
            if named or operation.inode in inodes:
                numbers.append(number)
        return numbers

    def play(self, operation: Operation) -> None:
        """Have it happen. Names that the record does not know (files that were made through FILE) are passed over."""
        node = self._inodes.get(operation.inode)
        match operation.kind:
            case "c" | "m":
                self._inodes[operation.inode] = node = File() if operation.kind == "c" else Folder()
                self._change(operation.path, node)
            case "w" | "t" if isinstance(node, File):
                node.change(operation.offset, operation.data if operation.kind == "w" else None)
            case "s" if isinstance(node, File):
                node.flush(operation.data)
            case "d" if isinstance(node, Folder):
                node.flush()
            case "r" if (moved := self._at(operation.path)) is not None:
                self._change(operation.second, moved)
                self._change(operation.path, None)
            case "l" if (linked := self._at(operation.path)) is not None:
                self._change(operation.second, linked)
            case "u":
                self._change(operation.path, None)

    def _parent(self, path: str) -> tuple[Folder | None, str]:
        parts = Path(os.path.relpath(path, self._root)).parts
        folder: File | Folder | None = self.top
        for part in parts[:-1]:
            folder = folder.names.get(part) if isinstance(folder, Folder) else None
        return (folder if isinstance(folder, Folder) else None), parts[-1]

    def _at(self, path: str) -> File | Folder | None:
        folder, name = self._parent(path)
        return None if folder is None else folder.names.get(name)

    def _change(self, path: str, node: File | Folder | None) -> None:
        folder, name = self._parent(path)
        if folder is not None:
            folder.change(name, node)

    def write(self, where: Path, mode: Mode, rng: random.Random) -> None:
        """Make the directory `where`, which must not exist, look as this one may be found."""
        written: dict[int, Path] = {}
        _write(self.top, where, mode, rng, written)


def _walk(folder: Folder, path: str) -> Iterator[tuple[str, File | Folder]]:
    yield path, folder
    for name, node in folder.names.items():
        if isinstance(node, Folder):
            yield from _walk(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node


def _write(folder: Folder, where: Path, mode: Mode, rng: random.Random, written: dict[int, Path]) -> None:
    where.mkdir()
    for name, node in folder.found(mode, rng).items():
        if isinstance(node, Folder):
            _write(node, where / name, mode, rng, written)
        elif id(node) in written:
            os.link(written[id(node)], where / name)
        else:
            written[id(node)] = where / name
            (where / name).write_bytes(node.found(mode, rng))
