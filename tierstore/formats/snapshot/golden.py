"""Golden examples of a snapshot: recorded requests, with what the version must answer before it may exist.

An example is a recorded request (`recorded_requests.py`) whose file also has the expected arrays, each as
`expected/<output>` or `expected/<feature>`. `index.json` beside the files names them. They are not in the manifest, so
that an earlier release passes them over. `schema/examples.md` has the format. Free functions and immutable values; any
thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tierstore.arguments import by_name, check_name
from tierstore.errors import SnapshotError, shown
from tierstore.formats import files
from tierstore.formats.names import GOLDEN_INDEX, REQUEST_SUFFIX
from tierstore.formats.objects import Location
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular
from tierstore.formats.snapshot.manifest import MAX_REQUESTS, check_path
from tierstore.formats.snapshot.recorded_requests import ragged, read_request, request_arrays, write_arrays

MAX_BYTES = 256 << 20  # of all examples of a snapshot
RTOL = 1e-3
ATOL = 1e-5  # of the largest expected number, where an example names no `atol`
_EXPECTED = "expected/"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _file_name(path: str) -> str:
    if not path.endswith(REQUEST_SUFFIX) or "/" in path:
        raise ValueError(f"expected the name of a {REQUEST_SUFFIX} file beside the index, got {path!r}")
    return check_path(path)


def _head_name(name: str) -> str:
    return name and check_name("head", name)


Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GoldenEntry(_Strict):
    """One example: its file, the head that scores it, and how far an answer may be off."""

    path: Annotated[str, AfterValidator(_file_name)]
    head: Annotated[str, AfterValidator(_head_name)] = ""
    rtol: Tolerance = RTOL
    atol: Tolerance | None = None


class GoldenIndex(_Strict):
    """`index.json`. `incomplete`: tables of which rows were left out, so that an example may name keys of these."""

    format: Literal[1] = 1
    examples: tuple[GoldenEntry, ...]
    incomplete: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Publish it."""
        files.publish_json(path, self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def read(cls, path: Location) -> GoldenIndex:
        """Read and check it. SnapshotError."""
        try:
            found = cls.model_validate_json(read_regular(path, MAX_DOCUMENT_BYTES))
        except OSError as error:
            raise SnapshotError(f"cannot be read: {error.strerror or error}", file=GOLDEN_INDEX) from error
        except ValidationError as error:
            texts = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
            raise SnapshotError("; ".join(texts), file=GOLDEN_INDEX) from error
        heads = [entry.head for entry in found.examples]
        for head in set(heads):
            if heads.count(head) > MAX_REQUESTS:
                raise too_many(head)
        return found


@dataclass(frozen=True, slots=True)
class GoldenExample:
    """An example as it was read: `inputs` as for `Model.predict`, `expected` by output or feature."""

    inputs: Mapping[str, Any]
    expected: Mapping[str, npt.NDArray[Any]]


def write_example(path: Path, inputs: Mapping[str, Any], expected: Any) -> int:
    """Publish an example, and return the bytes of its arrays. SnapshotError for what is no array."""
    arrays = request_arrays(inputs)
    for name in arrays:
        if name.startswith(_EXPECTED):
            raise SnapshotError(f"golden example: an input cannot be called {name!r}; rename it")
    wanted = request_arrays(dict(by_name(expected, "expected")))
    if not wanted:
        raise SnapshotError("golden example: expected at least one output or feature with what it should be, got none")
    arrays |= {f"{_EXPECTED}{name}": array for name, array in wanted.items()}
    write_arrays(path, arrays)
    return sum(array.nbytes for array in arrays.values())


def read_example(path: Location, *, file: str) -> GoldenExample:
    """The example in a file. SnapshotError naming `file`."""
    arrays = read_request(path, file=file)
    expected = {name.removeprefix(_EXPECTED): one for name, one in arrays.items() if name.startswith(_EXPECTED)}
    if not expected:
        raise SnapshotError("holds no expected outputs: not a golden example", file=file)
    inputs = {name: one for name, one in arrays.items() if not name.startswith(_EXPECTED)}
    return GoldenExample(ragged(inputs), expected)


def checked_tolerance(name: str, value: float) -> float:
    """A tolerance that was given. SnapshotError for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SnapshotError(f"golden example: {name}: expected a number of at least 0, got {shown(value)}")
    return float(value)


def too_many(head: str) -> SnapshotError:
    """The error for more examples than a head may have."""
    of = f"head {head!r}" if head else "the dense part"
    return SnapshotError(f"golden examples: expected at most {MAX_REQUESTS} for {of}", file=GOLDEN_INDEX)


def digest_parts(index: GoldenIndex | None, digests: Sequence[Any]) -> list[Any]:
    """What tells one set of examples from another; empty without any."""
    return [] if index is None else [json.loads(index.model_dump_json()), list(digests)]
