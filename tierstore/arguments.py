"""Checks of arguments: names, versions, numbers, and the keys of a request. Each raises InvalidInput, which says what
was expected.

Pure functions; any thread.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from tierstore.errors import InvalidInput, shown
from tierstore.types import NAME

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from tierstore.lazy import np

_VERSION_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


def check_name(kind: str, name: object) -> str:
    """Return `name` if a model, table or feature may have it: names become paths and metric labels.

    Raises InvalidInput.
    """
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"{kind} name {name!r} is not allowed: use 1 to 64 of A-Z a-z 0-9 _ -, starting with a letter or digit"
        )
    return name


def check_sequence(keys: object, kind: str) -> None:
    """Raise InvalidInput for a single key where several are expected, and for collections without an order."""
    if isinstance(keys, (set, frozenset, Mapping)):
        raise InvalidInput(f"expected a sequence of {kind} keys, got a {type(keys).__name__}, which has no order")
    if isinstance(keys, (str, bytes, bytearray, int, float, np.generic)):
        raise InvalidInput(f"expected a sequence of {kind} keys, got a single {type(keys).__name__}")


def check_end(feature: str, offsets: Any, n_keys: int) -> None:
    """Raise InvalidInput unless `offsets`, of one entry more than bags, end where the keys do."""
    last = int(offsets[-1]) if len(offsets) else None
    if last != n_keys:
        raise InvalidInput(
            f"{feature!r}: offsets with an end: expected {n_keys} as the last, the number of keys, got "
            f"{'none' if last is None else last}"
        )


def _is_integer(value: object) -> TypeGuard[int]:
    if isinstance(value, int):
        return not isinstance(value, bool)
    return "numpy" in sys.modules and isinstance(value, np.integer)  # else it can be no such number


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, float) or _is_integer(value):
        return True
    return "numpy" in sys.modules and isinstance(value, np.floating)


def as_version(version: object) -> int | str | None:
    """A version as callers name one: a number, also as text, a label, or None. InvalidInput for anything else."""
    if version is None:
        return None
    if _is_integer(version) and 0 <= version < 10**19:
        return int(version)
    text = str(version) if isinstance(version, str) else ""
    if _VERSION_NUMBER.fullmatch(text):
        return int(text)
    if NAME.fullmatch(text) is None or text.isdigit():
        raise InvalidInput(f"a version is a number, or a label such as 'stable' or 'canary'; got {shown(version)}")
    return text


def whole_number(name: str, value: object, least: int, most: int = (1 << 63) - 1) -> int:
    """`value` as an int. InvalidInput, which says `name`, for no integer, and for one that is out of range."""
    if _is_integer(value) and least <= value <= most:
        return int(value)
    raise InvalidInput(f"{name}: expected an integer from {least} to {most}, got {shown(value)}")


def number_or_none(name: str, value: object, least: int, most: int = (1 << 63) - 1) -> int | None:
    """`whole_number`, and None for None."""
    return None if value is None else whole_number(name, value, least, most)


def check_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """`value` as seconds: more than 0, or 0 too, and less than 30 years. InvalidInput, which says `name`."""
    if _is_number(value) and (0 < value < 1e9 or (zero and value == 0)):
        return float(value)
    legal = "0 or more" if zero else "more than 0"
    raise InvalidInput(f"{name}: expected seconds, {legal} and less than 1e9, got {shown(value)}")


def check_share(share: object) -> float:
    """`share` as a number from 0 to 1. InvalidInput."""
    if _is_number(share) and 0 <= share <= 1:
        return float(share)
    raise InvalidInput(f"the share is {shown(share)}, expected a number from 0 to 1: 0.05 is 5% of the requests")


def by_name(values: Any, kind: str) -> list[tuple[Any, Any]]:
    """The items of a mapping, or of a frame, whose keys are names. InvalidInput for what has no items."""
    if not hasattr(values, "items"):
        raise InvalidInput(f"expected {kind} by name, such as {{'user_id': [17]}}, got {type(values).__name__}")
    return list(values.items())


def names_of(kind: str, names: Any) -> list[str] | None:
    """A caller's sequence of names as a list; None for None. InvalidInput for a single name and for anything else."""
    if names is None:
        return None
    if not isinstance(names, (str, bytes)) and isinstance(names, Iterable):
        every: list[str] = list(names)
        if all(isinstance(name, str) for name in every):
            if twice := [name for name in every if every.count(name) > 1]:
                raise InvalidInput(f"{kind}: {twice[0]!r} is named twice")
            return every
    raise InvalidInput(f"{kind}: expected names, such as ['score'], got {shown(names)}")


def keys_and_bags(feature: str, value: Any) -> tuple[Any, Any, Any]:
    """(keys, offsets or None, weights or None) of a feature's `value` in a request of several features.

    It is keys, `(keys, offsets)`, `(keys, offsets, weights)`, or a JaggedTensor. A tuple of single keys is keys.
    InvalidInput for a tuple of another length.
    """
    value = as_bags(feature, value)
    if not isinstance(value, tuple) or all(
        isinstance(one, (str, bytes)) or not hasattr(one, "__len__") for one in value
    ):
        return value, None, None
    if len(value) not in (2, 3):
        raise InvalidInput(
            f"{feature!r}: expected keys, (keys, offsets) or (keys, offsets, weights), got a tuple of {len(value)}"
        )
    return value if len(value) == 3 else (*value, None)


def weights_of(weights: Any, n: int) -> npt.NDArray[np.float32]:
    """A caller's `weights` as float32[n], one for each of `n` keys; not checked for NaN. InvalidInput."""
    try:
        if isinstance(weights, np.ndarray) and weights.dtype == np.float32:
            array = np.ascontiguousarray(weights)
        else:
            with np.errstate(over="ignore"):  # which takes as long as a small look-up's checks
                array = np.ascontiguousarray(weights, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"weights: expected {n} numbers: {error}") from error
    if array.shape != (n,):
        raise InvalidInput(f"weights: expected one a key, shape ({n},), got {array.shape}")
    return array


def as_bags(feature: str, value: Any) -> Any:
    """A feature's `value`; of a JaggedTensor of TorchRec, told by its methods, `(keys, offsets, weights or None)`.

    Its offsets have one entry more than there are bags, ours have not. InvalidInput for a KeyedJaggedTensor, which has
    several features.
    """
    if not hasattr(value, "weights_or_none"):
        return value
    if hasattr(value, "to_dict"):
        raise InvalidInput(
            f"{feature!r}: expected the JaggedTensor of one feature, got a KeyedJaggedTensor: its to_dict() has them"
        )
    keys, offsets = value.values(), value.offsets()
    check_end(feature, offsets, len(keys))
    return keys, offsets[:-1], value.weights_or_none()
