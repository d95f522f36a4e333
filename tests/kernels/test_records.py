"""Records that Python and kernels share: fields by name on both sides, addresses of fields, records that name others."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import pytest
from numba.core.errors import TypingError

from tierstore.kernels.atomics import add_at, relaxed_i64
from tierstore.kernels.codec import address_of
from tierstore.kernels.records import ALL, ITSELF, at, define, place

STOP = define("TestStop", "a stop of a line", {
    "number riders": "of the stop, and who waits there",
    "sizes": ((np.int64, (3,)), "some numbers"),
    "open": (np.uint8, "1: it is served"),
    "following": (ITSELF, "the next one, or 0"),
})  # fmt: skip
LINE = define("TestLine", "a line", {"first": (STOP, "its first stop"), "riders": "in all"}, apart=True)
stop_at, line_at = at(STOP), at(LINE)


@nb.njit
def _visit(address):  # type: ignore[no-untyped-def]
    """Count the riders of all stops, and mark each."""
    line = line_at(address)
    stop = line.first
    while stop != 0:
        stop.open = 1
        stop.sizes[1] += stop.number
        add_at(place(line, "riders"), stop.riders)
        stop = stop.following
    return relaxed_i64(place(line, "riders"))


@nb.njit
def _number_of(address, index):  # type: ignore[no-untyped-def]
    stop = 0 if index < 0 else stop_at(address, index)
    return -1 if stop == 0 else stop.number


@nb.njit
def _distance(address):  # type: ignore[no-untyped-def]
    return stop_at(address, 1) - stop_at(address)


def stops() -> np.ndarray:
    made = STOP.new(3)
    made["number"], made["riders"] = [5, 6, 7], [1, 0, 30]
    made["following"][:2] = address_of(made[1:]), address_of(made[2:])
    return made


def test_kernels_read_and_write_what_python_does() -> None:
    made = stops()
    line = LINE.make(first=address_of(made), riders=100)
    assert _visit(address_of(line)) == 131
    assert int(line["riders"]) == 131
    assert made["sizes"].tolist() == [[0, 5, 0], [0, 6, 0], [0, 7, 0]]
    assert made["open"].tolist() == [1, 1, 1]
    assert STOP.view(int(made["following"][0])).number == 6


def test_a_record_is_found_by_address_and_index() -> None:
    made = stops()
    assert [_number_of(address_of(made), index) for index in (-1, 0, 2)] == [-1, 5, 7]
    assert _distance(address_of(made)) == STOP.bytes == made.strides[0]


def test_fields_are_aligned_and_apart_where_they_are_to_be() -> None:
    assert STOP.bytes % 8 == 0
    assert STOP.offset("following") % 8 == 0
    assert (LINE.offset("riders"), LINE.bytes) == (64, 128)
    line = LINE.new()
    assert LINE.place(line, "riders") == address_of(line) + 64


def test_a_wrong_name_is_an_error_on_both_sides() -> None:
    @nb.njit
    def read(address: Any) -> Any:
        return stop_at(address).speed

    with pytest.raises(TypingError, match="TestStop has no field speed: it has number, riders"):
        read(0)
    with pytest.raises(ValueError, match="speed"):
        STOP.make(speed=1)
    with pytest.raises(ValueError, match="TestStop"):
        define("TestStop", "another one", {"number": "of it"})


def test_the_page_of_layouts_has_every_record() -> None:
    from tools.make_layouts_page import page

    sections = page().split("\n## ")[1:]
    assert {section.split("\n")[0] for section in sections} == set(ALL)
