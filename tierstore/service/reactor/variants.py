"""Variants as numbers: how requests of a structure are answered, as words for reactors (`lookup/binding.py`).

Pure functions; any thread.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.formats.key_hash import form_of
from tierstore.formats.keys import as_codes
from tierstore.formats.trainer_hash import RowNumbers
from tierstore.kernels.codec import address_of
from tierstore.kernels.pool import combiner_code
from tierstore.kernels.trainer_hashes import make_rows
from tierstore.lookup import binding
from tierstore.lookup import plans as layout
from tierstore.predict.binding import ALIGNMENT
from tierstore.reactor import layout as kernel
from tierstore.service.dataplane.datatypes import BYTES, KEY_DATATYPES
from tierstore.service.dataplane.plan import Call, OutputSpec, Plan
from tierstore.types import KeyHash, TrainerHash
from tierstore.wire.http1.date import DATE_PLACE

FOUND = ".found"
Words = npt.NDArray[Any]
Pieces = list[
    tuple[Any, ...]
]  # of an answer: texts, each with what its writer puts behind it, the fields of `layout.PIECE`
_PIECE_WORDS = layout.PIECE.bytes // 8


class Protocol(typing.Protocol):
    """What a variant depends on of its protocol."""

    @property
    def written(self) -> dict[str, int]:
        """The words of a variant that say how answers are written."""

    @property
    def datatypes(self) -> Sequence[int]:
        """The number of each input's datatype, if requests do not say it."""


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """The plan of a structure's requests under one version with one dense part, whose views have a `token`."""

    token: int
    view: Any
    plan: Plan
    protocol: Protocol


def address(data: bytes) -> int:
    """The address of bytes that the caller keeps alive."""
    return address_of(np.frombuffer(data, np.uint8))


def head_words(head: bytes) -> dict[str, int]:
    """The words of the head of an answer, ready to be copied; it has `DATE_PLACE` for the date, if it has a date."""
    return {"head_at": address(head), "head_bytes": len(head), "date_at": head.find(DATE_PLACE)}


def variant_words(of: VersionPlan, pieces: Pieces, counts: list[int]) -> tuple[Words, list[object]]:
    """The words of a look-up's variant, and the objects that they point to.

    `pieces` are those of an answer of the protocol; `counts`: the places of the version's and tables' counts.
    """
    plan = of.plan
    rows = [(call.rows[0], plan.specs[call.rows[0]].datatype == "FP16") if call.rows else None for call in plan.calls]
    elements = [spec.dtype.itemsize * (1 if spec.name.endswith(FOUND) else spec.shape[-1]) for spec in plan.specs]
    return _variant_words(of, pieces, counts, rows, elements, alignment=1)


def prediction_words(of: VersionPlan, pieces: Pieces, counts: list[int], scoring: Words) -> tuple[Words, list[object]]:
    """`variant_words` for predictions, whose rows have places for their graph: with the words of a scoring."""
    rows: list[tuple[int, bool] | None] = []
    elements: list[int] = []
    for call in of.plan.calls:
        rows.append(None if call.feeds is None else (len(elements), call.feeds.dtype == "float16"))
        elements += [] if call.feeds is None else [call.feeds.row_bytes]
    more = {"alignment": ALIGNMENT, "scoring": address_of(scoring)}
    words, kept = _variant_words(of, pieces, counts, rows, elements, **more)
    return words, [*kept, scoring]


def _variant_words(
    of: VersionPlan,
    pieces: Pieces,
    counts: list[int],
    rows: list[tuple[int, bool] | None],
    elements: list[int],
    **more: int,
) -> tuple[Words, list[object]]:
    """`rows`: for each call the output with its rows, and whether as halves; `elements`: bytes of an element of each
    output.
    """
    planned, protocol, order = of.plan.calls, of.protocol, list(of.view.open_version.tables)
    hashes = [_hash_words(call.feature.hash) for call in planned]
    calls = [
        _planned_call(call, row, order.index(call.table.name), row_of_counts, how)
        for call, row, row_of_counts, (how, _) in zip(planned, rows, counts[1:], hashes, strict=True)
    ]
    text = b"".join(text for text, *_ in pieces)
    at, texts = address(text), []
    for piece, *behind in pieces:
        texts.append((at, len(piece), *behind, *[0] * (_PIECE_WORDS - 2 - len(behind))))
        at += len(piece)
    # one array of calls, bytes of elements, texts and datatypes: making an array and getting its address costs more
    # than its numbers
    numbers = np.array([*chain(*calls), *elements, *chain(*texts), *protocol.datatypes], np.int64)
    calls_at = address_of(numbers)
    elements_at = calls_at + layout.PLANNED.bytes * len(calls)
    texts_at = elements_at + 8 * len(elements)
    words = layout.LOOKUP.make(
        token=of.token,
        counts=counts[0],
        outputs=len(elements),
        planned_calls=len(calls),
        pieces=len(pieces),
        calls=calls_at,
        output_bytes=elements_at,
        texts=texts_at,
        datatypes=texts_at + layout.PIECE.bytes * len(pieces) if protocol.datatypes else 0,
        **protocol.written,
        **more,
    )
    return words, [text, numbers, hashes]


def is_runnable(plan: Plan) -> bool:
    """Whether a reactor can answer requests of this plan's structure, of any sizes."""
    if plan.dense is not None or plan.numbers is not None:
        return False
    # Python checks strings that nothing is looked up for
    return not any(call.spec.datatype == BYTES and not call.rows and not call.found for call in plan.calls)


def leading_sizes(spec: OutputSpec) -> int:
    """How many of an output's sizes are values of the request; later sizes are the same for all requests."""
    return len(spec.shape) - (0 if spec.name.endswith(FOUND) else 1)


def has_room(texts: Iterable[bytes], values: int) -> bool:
    """Whether an answer of these texts, with so many values between them, is short enough for a reactor."""
    return sum(map(len, texts)) <= kernel.HEAD_ROOM - binding.MOST_ADDED_BYTES - binding.MOST_DIGITS * values


def _planned_call(
    call: Call, rows: tuple[int, bool] | None, table: int, counts: int, how: tuple[int, int, int]
) -> tuple[int, ...]:
    """A call in the form for `binding.bind`. `rows`: the output with its rows, and whether as halves; its hash."""
    if rows is not None:
        kind = layout.BAGS_OF_ROWS if call.pooled else layout.ROWS
    else:
        kind = layout.FOUND_ALONE if call.found else layout.CHECKED
    padding = call.feature.padding_key  # Python handles a key that collides, and all keys with its hash
    usual = call.spec.datatype == KEY_DATATYPES[call.feature.key_type(call.table)][0]
    form = layout.STRINGS if call.spec.datatype == BYTES else layout.AS_CODES if usual else layout.NO_NEGATIVE
    return layout.PLANNED.row(
        table=table,
        kind=kind,
        out_code=int(rows is not None and rows[1]),
        combiner=0 if call.combiner is None else combiner_code(call.combiner),
        padded=int(padding is not None),
        padding=0 if padding is None else int(as_codes([padding], call.table.key)[0]),
        table_counts=counts,
        key_form=form,
        keys_of=call.keys,
        offsets_of=binding.NONE if call.offsets is None else call.offsets,
        weights_of=binding.NONE if call.weights is None else call.weights,
        rows_to=binding.NONE if rows is None else rows[0],
        found_to=call.found[0] if call.found else binding.NONE,
        **dict(zip(("hash", "mod", "bits"), how, strict=True)),
    )


def _hash_words(how: KeyHash | TrainerHash | None) -> tuple[tuple[int, int, int], object]:
    """The fields `hash`, `mod` and `bits` of a planned call, and the object that they point to."""
    if isinstance(how, TrainerHash):
        numbers = RowNumbers.of(how)
        return (layout.AS_TRAINED, numbers.address, make_rows.address), numbers
    return form_of(how), None
