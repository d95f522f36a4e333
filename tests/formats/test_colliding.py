"""Keys that share a hash: told apart by their strings, whatever deltas bring, and kept in a record."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collisions import digest, family, of_hash, pair
from tests.counts import few_or_many
from tierstore.formats.colliding import NONE, CollidingKeys, free_code, from_record, hash_arrow, to_record
from tierstore.formats.keys import as_codes
from tierstore.types import KeyType

A, B = pair(0)
ALIKE = family(5)
UNIVERSE = [A, B, *ALIKE, "x", "y", "z"]


def codes_of(keys: CollidingKeys, texts: list[str]) -> list[int]:
    strings = pa.array(texts, pa.large_string())
    return keys.codes_of(strings, hash_arrow(strings)).tolist()


def changed(keys: CollidingKeys, texts: list[str]) -> tuple[dict[str, int], CollidingKeys]:
    """Codes of the strings of one delta, and the colliding keys after it."""
    texts = sorted(texts, key=digest)
    strings = pa.array(texts, pa.large_string())
    codes, after = keys.changed(hash_arrow(strings), lambda at: strings.take(pa.array(at)))
    return dict(zip(texts, codes.tolist(), strict=True)), after


def test_only_strings_that_are_known_go_by_another_code() -> None:
    keys = CollidingKeys([(A, 5), (B, 6)])
    assert codes_of(keys, ["x", A, "y", B, A]) == [digest("x"), 5, digest("y"), 6, 5]
    assert codes_of(CollidingKeys([(A, 5)]), [B, A]) == [digest(B), 5]
    assert codes_of(NONE, [A, B]) == [digest(A), digest(B)]
    assert as_codes(pa.array([A, "x", B])[1:], KeyType.STRING, keys).tolist() == [digest("x"), 6]
    assert as_codes(np.array([A, B]), KeyType.STRING, keys).tolist() == [5, 6]
    assert as_codes([], KeyType.STRING, keys).tolist() == []


def test_hashes_that_nobody_shares_are_answered_as_they_are() -> None:
    hashes = hash_arrow(pa.array(["x", "y"], pa.large_string()))
    strings = pa.array(["x", "y"], pa.large_string())
    assert CollidingKeys([(A, 5), (B, 6)]).codes_of(strings, hashes) is hashes
    assert NONE.changed(hashes, strings.take) == (hashes, NONE)


def test_a_string_that_hashes_to_the_code_of_another_gets_its_own() -> None:
    number = 0
    while (other := of_hash(number)) is None:
        number += 1
    keys = CollidingKeys([(A, number), (B, 6)])
    codes, after = changed(keys, [other, "x"])
    assert codes["x"] == digest("x")
    assert codes[other] not in (number, 6)
    assert codes_of(after, [A, B, other]) == [number, 6, codes[other]]


def test_very_many_are_found_as_well_as_few() -> None:
    texts = [text for salt in "abcdefghijkl" for text in family(4, salt)]
    keys = CollidingKeys((text, code) for code, text in enumerate(texts))
    assert codes_of(keys, ["x", *texts]) == [digest("x"), *range(len(texts))]


@settings(max_examples=few_or_many(50, 200))
@given(
    st.sets(st.sampled_from(UNIVERSE)),
    st.lists(st.dictionaries(st.sampled_from(UNIVERSE), st.none() | st.integers(), min_size=1), max_size=8),
)
def test_what_a_delta_shows_to_collide_is_right_from_then_on(
    loaded: set[str], deltas: list[dict[str, int | None]]
) -> None:
    """Against a dict of strings. Two that came alone, one after the other, cannot be told apart, until one delta has both."""
    shared = {code for code in map(digest, loaded) if sum(digest(text) == code for text in loaded) > 1}
    keys = CollidingKeys((text, 100 + i) for i, text in enumerate(sorted(loaded)) if digest(text) in shared)
    store: dict[int, int | None] = dict.fromkeys(codes_of(keys, sorted(loaded)), -1)
    model: dict[str, int | None] = dict.fromkeys(loaded, -1)
    apart = {text for text in loaded if digest(text) in shared}
    alone: dict[int, set[str]] = {}  # strings that were written under their hash
    for text in loaded - apart:
        alone.setdefault(digest(text), set()).add(text)
    for delta in deltas:
        codes, keys = changed(keys, list(delta))
        assert len(set(codes.values())) == len(codes)
        store |= {codes[text]: value for text, value in delta.items()}
        model |= delta
        shared |= {digest(text) for text in delta if sum(digest(other) == digest(text) for other in delta) > 1}
        for text in delta:
            if digest(text) in shared:
                apart.add(text)
            else:
                alone.setdefault(digest(text), set()).add(text)
        for text in UNIVERSE:
            if text in apart or alone.get(digest(text), {text}) == {text}:
                assert store.get(*codes_of(keys, [text])) == model.get(text), text
    assert {text for text, _ in keys.entries()} == apart


def test_a_record_gives_back_what_it_was_made_of() -> None:
    tables = {"item": CollidingKeys([(A, 5), (B, -6)]), "user": NONE}
    back = from_record(to_record(tables)["colliding_keys"])
    assert {name: keys.entries() for name, keys in back.items()} == {"item": [(A, 5), (B, -6)]}
    assert to_record({"user": NONE}) == {}
    assert from_record(None) == {}


@pytest.mark.parametrize(
    "value", [b"{", b"[]", b'{"item": [["a"]]}', b'{"item": [["a", "b"]]}', b'{"item": 5}', b"\xff"]
)
def test_a_record_that_makes_no_sense_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="its record 'colliding_keys' cannot be read"):
        from_record(value)


def test_a_free_code_is_close_and_within_limits() -> None:
    assert free_code(5, {6, 7}.__contains__) == 8
    assert free_code(5, {6, 7}.__contains__, high=7) == 4
    assert free_code(2**63 - 1, lambda _: False) == 2**63 - 2
    with pytest.raises(ValueError, match="no code is free from 4 to 7"):
        free_code(5, {4, 6, 7}.__contains__, low=4, high=7)
