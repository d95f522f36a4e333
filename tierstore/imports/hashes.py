"""Reads how a trainer's object hashes keys, as a feature's `hash`; and row numbers by a `hash`, to compare with
training's.

Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tierstore.errors import InvalidInput, SnapshotError, shown
from tierstore.formats.key_hash import rows_of
from tierstore.formats.keys import as_codes
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.trainer_hash import RowNumbers
from tierstore.types import KeyHash, Keys, KeysLike

_64_BITS = (1 << 64) - 1


def hash_like(trained: Any, *, key: str = "int64", column: str | None = None) -> dict[str, Any]:
    """A feature's `hash` that does what an object of a trainer does: for `SnapshotWriter.feature` and `Feature`.

    Args:
        trained: a `Hashing` layer of Keras, a `FeatureHasher` of scikit-learn, a `HashingTF` or `FeatureHasher` of
            pyspark.ml, or a `HashKeys` of `tierstore.torch`.
        key: the type of the keys in requests: int64, uint64 or string.
        column: the column of a `FeatureHasher` that the keys are of, where it hashes `column=key`.

    Raises InvalidInput for anything else.
    """
    kind = type(trained).__name__
    library = type(trained).__module__.partition(".")[0]
    found = _KNOWN.get((library, kind))
    if found is None:
        known = ", ".join(f"{name} of {package}" for package, name in _KNOWN)
        raise InvalidInput(f"expected one of {known}; got {shown(trained)}: give `hash` as a mapping (docs/formats.md)")
    how = found(trained, column) | {"key": str(key)}
    _parsed(how)
    return how


def row_numbers(keys: KeysLike, hash: Mapping[str, Any]) -> Keys:
    """The row numbers, int64[n], that a feature with this `hash` gives to keys: to compare with those of the training.

    Raises InvalidInput for keys of another type than the `hash` says, and for a `hash` that is none.
    """
    how = _parsed(hash)
    return rows_of(as_codes(keys, how.key), how) if isinstance(how, KeyHash) else RowNumbers.of(how).rows(keys)


def _parsed(hash: Mapping[str, Any]) -> Any:
    table = {"name": "table", "dim": 1, "dtype": "float32", "rows": 0, "shards": ()}
    feature = {"name": "hash", "table": "table", "hash": dict(hash)}
    try:
        return Manifest.create(model="hash", version=1, tables=(table,), features=(feature,)).features[0].spec().hash
    except SnapshotError as error:
        raise InvalidInput(f"hash: {error}") from error


def _keras(layer: Any, column: str | None) -> dict[str, Any]:
    salt = None if layer.salt is None else tuple(int(word) & _64_BITS for word in layer.salt)
    mask = layer.mask_value if layer.num_bins > 1 else None
    how = {"function": "tensorflow", "mod": int(layer.num_bins), "salt": salt, "mask": mask}
    return {name: value for name, value in how.items() if value is not None}


def _sklearn(hasher: Any, column: str | None) -> dict[str, Any]:
    how = {"function": "sklearn", "mod": int(hasher.n_features)}
    how |= {} if hasher.alternate_sign else {"alternate_sign": False}
    return how | _prefix(column, hasher.input_type == "dict")


def _spark(hasher: Any, column: str | None) -> dict[str, Any]:
    is_column = type(hasher).__name__ == "FeatureHasher"
    return {"function": "spark_ml", "mod": int(hasher.getNumFeatures())} | _prefix(column, is_column)


def _prefix(column: str | None, is_wanted: bool) -> dict[str, str]:
    if is_wanted and column is None:
        raise InvalidInput("column: expected the name of the column that the keys are of, as `column=key` is hashed")
    return {} if column is None else {"prefix": f"{column}="}


_KNOWN: dict[tuple[str, str], Callable[[Any, str | None], dict[str, Any]]] = {
    ("keras", "Hashing"): _keras,
    ("sklearn", "FeatureHasher"): _sklearn,
    ("pyspark", "HashingTF"): _spark,
    ("pyspark", "FeatureHasher"): _spark,
    ("tierstore", "HashKeys"): lambda module, _: {"mod": module.how.mod, "seed": module.how.seed},
}
