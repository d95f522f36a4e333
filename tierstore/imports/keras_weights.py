"""Variables of Keras' files, read by h5py: `.weights.h5`, `.keras`, and `.h5` as earlier releases write it.

A variable is named by its layer: `item.0` is the first of the layer `item`, of an Embedding its rows. Where two layers
have one name, or a release wrote none, it is the path in the file, `layers.embedding_1.0`: Keras numbers layers of a
class as they come in the model. An earlier `.h5` has names of variables too: `item.embeddings`.

Layout: keras/src/saving/saving_lib.py (H5IOStore), legacy_h5_format.py, Keras 3.15. One thread at a time.
"""

from __future__ import annotations

import glob
import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from tierstore.errors import InvalidInput, MissingExtra
from tierstore.formats.regular import open_regular
from tierstore.imports.named_tensors import NamedTensors, TensorKind
from tierstore.imports.places import KERAS
from tierstore.imports.raw_pairs import BATCH_ROWS

_WEIGHTS = "model.weights.h5"  # in a .keras
_VARIABLES, _LEGACY = "vars", "model_weights"  # groups
_OPTIMIZERS = ("optimizer", "optimizer_weights")
_SHARD = re.compile(r"(.+)_\d{5}\.weights\.h5")
_BFLOAT16 = "bfloat16"
_LOCAL_HEADER_BYTES = 30  # of a member of a zip, before its name (APPNOTE.TXT, 4.3.7)


def read_keras(path: Path) -> NamedTensors:
    """The variables of a file, those of its optimizer left out. InvalidInput for a file that is not Keras'."""
    kinds, unreadable, paths = {}, {}, {}
    with _opened(path) as file:
        variables = _variables(path, file)
        if not variables and not any(group in file for group in _OPTIMIZERS):  # which a shard may have alone
            raise InvalidInput("expected weights that Keras saved, got no variables of layers")
        for name, variable in variables.items():
            if (why := _refused(variable)) is not None:
                unreadable[name] = why
            else:
                kinds[name] = TensorKind(variable.shape, _dtype(variable))
                paths[name] = variable.name

    def read(names: list[str], first: int) -> Iterator[tuple[np.ndarray, ...]]:
        with _opened(path) as file:
            wanted = [file[paths[name]] for name in names]
            for begin in range(first, kinds[names[0]].shape[0], BATCH_ROWS):
                yield tuple(_numbers(variable, begin) for variable in wanted)

    return NamedTensors(path, kinds, read, unreadable)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("Keras' files are read by h5py: pip install 'tierstore[h5py]'") from error
    with open_regular(path) as file:
        source: Any = _weights_in(file) if path.suffix.lower() == KERAS else file
        with h5py.File(source, "r") as opened:
            yield opened


class _Part(io.RawIOBase):
    """Some bytes of a file as a file of their own: a zip's member, which Python seeks in by reading all before it."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._begin + self._at)
        read = int(self._file.readinto(view))  # type: ignore[attr-defined]
        self._at += read
        return read


def _weights_in(file: IO[bytes]) -> _Part:
    with zipfile.ZipFile(file) as archive:
        members = {one.filename: one for one in archive.infolist()}
    member = members.get(_WEIGHTS)
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        what = f"got {', '.join(members) or 'nothing'}" if member is None else "got it compressed"
        raise InvalidInput(f"expected {_WEIGHTS} in it, as Keras writes it, {what}")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_and_extra = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return _Part(file, member.header_offset + _LOCAL_HEADER_BYTES + name_and_extra, member.file_size)


def _variables(path: Path, file: Any) -> dict[str, Any]:
    """The variables of layers by their names. A link to another file is no variable: h5py visits none."""
    layers = _layers(path, file)
    names = Counter(layers.values())
    legacy = 1 if _LEGACY in file else 0 if "layer_names" in file.attrs else None  # groups above those of layers
    found = {}
    of_legacy: list[tuple[list[str], Any]] = []

    def visit(where: str, one: Any) -> None:
        parts = where.split("/")
        if not hasattr(one, "shape") or parts[0] in _OPTIMIZERS:
            return
        if legacy is not None:
            of_legacy.append((parts[legacy:], one))
        elif parts[-2:-1] == [_VARIABLES]:
            layer = layers.get("/".join(parts[:-1]))
            of = [layer] if layer is not None and names[layer] == 1 else parts[:-2]
            found[".".join([*of, parts[-1]])] = one

    file.visititems(visit)
    short = Counter(".".join(parts[1:]) for parts, _ in of_legacy)
    for parts, one in of_legacy:
        name = ".".join(parts[1:])
        found[name if short[name] == 1 else ".".join(parts)] = one
    return found


def _layers(path: Path, file: Any) -> dict[str, str]:
    """Names of layers by the groups of their variables.

    Of shards those of all: the one that a layer begins in has its name, and another the variable that no longer fit.
    """
    found = {}

    def visit(where: str, one: Any) -> None:
        if where.rpartition("/")[2] == _VARIABLES and isinstance(one.attrs.get("name"), str):
            found[where] = one.attrs["name"]

    file.visititems(visit)
    if shard := _SHARD.fullmatch(path.name):
        for other in path.parent.glob(f"{glob.escape(shard[1])}_?????.weights.h5"):
            with _opened(other) as opened:
                opened.visititems(visit)
    return found


def _refused(variable: Any) -> str | None:
    """Why a variable is not read; None for one that is."""
    if variable.is_virtual or variable.external:
        return "lies in another file"
    if variable.dtype.kind in "iu" and sum(hasattr(one, "shape") for one in variable.parent.values()) > 1:
        return (
            f"expected rows of floats, got {variable.dtype} with other variables beside it, as a quantized layer has "
            "them: codes, whose numbers follow from those. Save the model as it was before quantize()"
        )
    return None


def _dtype(variable: Any) -> str:
    return _BFLOAT16 if variable.attrs.get("dtype") == _BFLOAT16 else str(variable.dtype.newbyteorder("="))


def _numbers(variable: Any, first: int) -> np.ndarray:
    """Rows from `first` on; bfloat16, which HDF5 has as two bytes, becomes float32."""
    rows: np.ndarray = variable[first : first + BATCH_ROWS]
    if _dtype(variable) == _BFLOAT16:
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)
