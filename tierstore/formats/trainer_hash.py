"""Row numbers of keys as trainers make them, for features whose `hash` names a `function`.

`FUNCTIONS` says what each computes. Models were trained with that, so it never changes. Immutable values; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore.errors import InvalidInput
from tierstore.formats.key_arrays import key_array
from tierstore.formats.keys import as_codes
from tierstore.formats.strings import as_arrow_strings
from tierstore.kernels import trainer_hashes as kernel
from tierstore.kernels.codec import address_of
from tierstore.types import Keys, KeysLike, KeyType, TrainerHash

_TEXT_KEYS = frozenset(KeyType)
_SIGNED_KEYS = frozenset({KeyType.INT64, KeyType.STRING})
_NUMBERS = frozenset({KeyType.INT64})


@dataclass(frozen=True, slots=True)
class Function:
    """What a function computes: how an integer is hashed, and how a hash becomes a row number.

    `options` are the fields of `TrainerHash` that it has beside `mod` and `key`, and `keys` the types of keys.
    """

    algorithm: int
    integers: int
    rest: int
    options: frozenset[str] = frozenset()
    keys: frozenset[KeyType] = _TEXT_KEYS
    seed: int = 0


def _function(algorithm: int, integers: int, rest: int, options: str = "", **more: Any) -> Function:
    return Function(algorithm, integers, rest, frozenset(options.split()), **more)


FUNCTIONS: Mapping[str, Function] = {
    # Keras' Hashing, tf.strings.to_hash_bucket_fast, TensorFlow's feature columns; with a salt to_hash_bucket_strong
    "tensorflow": _function(kernel.FINGERPRINT64, kernel.AS_TEXT, kernel.UNSIGNED, "mask salt"),
    # tf.strings.to_hash_bucket
    "tensorflow_v1": _function(kernel.MURMUR64A, kernel.AS_TEXT, kernel.UNSIGNED, seed=0xDECAFCAFFE),
    # Spark SQL, modulo by pmod or of the absolute value
    "spark_hash": _function(
        kernel.SPARK_MURMUR3, kernel.OF_8_BYTES, kernel.FLOOR, "bits absolute", keys=_SIGNED_KEYS, seed=42
    ),
    "spark_xxhash64": _function(
        kernel.XXH64, kernel.OF_8_BYTES, kernel.FLOOR, "bits absolute", keys=_SIGNED_KEYS, seed=42
    ),
    # HashingTF and FeatureHasher of pyspark.ml
    "spark_ml": _function(kernel.MURMUR3, kernel.AS_TEXT, kernel.FLOOR, "prefix", seed=42),
    # FeatureHasher
    "sklearn": _function(kernel.MURMUR3, kernel.AS_TEXT, kernel.WITH_SIGN, "prefix alternate_sign"),
    "vowpal_wabbit": _function(kernel.VOWPAL_WABBIT, kernel.AS_TEXT, kernel.UNSIGNED, "namespace"),
    # Math.floorMod of hashCode() of a String, Long or Integer, or the absolute value's remainder
    "java": _function(kernel.JAVA, kernel.OF_8_BYTES, kernel.FLOOR, "bits absolute", keys=_SIGNED_KEYS),
    # FeatureHasher of Flink ML
    "flink_ml": _function(kernel.MURMUR3_UTF16, kernel.AS_TEXT, kernel.WRAPPED_ABSOLUTE, "prefix"),
    # PaddlePaddle's operator `hash`
    "paddle": _function(kernel.XXH64, kernel.OF_8_BYTES, kernel.UNSIGNED, "bits seed", keys=_NUMBERS),
    # the slot at which TorchRec's hash ZCH begins to look for an id
    "torchrec_zch_home": _function(kernel.MURMUR3_128, kernel.OF_8_BYTES, kernel.UNSIGNED, keys=_NUMBERS),
}


class RowNumbers:
    """A function with its arguments, ready to be called; `words`, a TRAINER_HASH, are what kernels read."""

    __slots__ = ("_kept", "how", "words")

    def __init__(self, how: TrainerHash) -> None:
        function = FUNCTIONS[how.function]
        masked, prefix = how.mask is not None, (how.prefix or "").encode()
        rest, algorithm, low, high = function.rest, function.algorithm, *(how.salt or (0, 0))
        if how.salt is not None:
            algorithm = kernel.SIPHASH
        if how.absolute or (how.alternate_sign is False):
            rest = kernel.ABSOLUTE
        mask = np.frombuffer(str(how.mask).encode() or b"\0", np.uint8)
        before = np.frombuffer(prefix or b"\0", np.uint8)
        self.how, self._kept = how, (mask, before)
        self.words = kernel.TRAINER_HASH.make(
            algorithm=algorithm,
            integers=kernel.OF_4_BYTES if how.bits == 32 else function.integers,
            rest=rest,
            buckets=how.mod - masked,
            first=int(masked),
            unsigned=int(how.key is KeyType.UINT64),
            seed=_namespace_seed(how.namespace) if how.namespace else function.seed if how.seed is None else how.seed,
            key_0=low,
            key_1=high,
            mask_at=address_of(mask),
            mask_bytes=len(str(how.mask).encode()) if masked else -1,
            prefix_at=address_of(before),
            prefix_bytes=len(prefix),
        )

    @staticmethod
    @lru_cache(256)
    def of(how: TrainerHash) -> RowNumbers:
        return RowNumbers(how)

    @property
    def address(self) -> int:
        """The address of `words`, valid as long as this lives."""
        return address_of(self.words)

    def rows(self, keys: KeysLike) -> Keys:
        """The row numbers of keys of the type `how.key`: int64[n], C-contiguous, new. InvalidInput."""
        if self.how.key is KeyType.STRING:
            array = key_array(keys, self.how.key)
            return self._of_strings(as_arrow_strings(array)) if len(array) else np.empty(0, np.int64)
        codes = as_codes(keys, self.how.key)
        rows = np.empty(len(codes), np.int64)
        bad = self._call(kernel.OF_INTEGERS, address_of(codes), 0, rows)
        if bad >= 0 and self.how.bits != 32:
            raise MemoryError("no memory for the text of a key")
        if bad >= 0:
            raise InvalidInput(
                f"expected keys of 32 bits, -2^31 to 2^31 - 1, as the hash of the feature says (bits); got {codes[bad]}"
            )
        return rows

    def _of_strings(self, strings: pa.Array) -> Keys:
        rows = np.empty(len(strings), np.int64)
        _, offsets, data = strings.buffers()
        at = 0 if data is None else data.address
        if self._call(kernel.OF_STRINGS, at, offsets.address + 8 * strings.offset, rows) >= 0:
            raise MemoryError("no memory for the text of a key")
        return rows

    def _call(self, form: int, keys: int, sizes: int, out: Keys) -> int:
        function = kernel.make_rows.address
        return int(kernel.call_make_rows(function, self.address, form, keys, sizes, len(out), address_of(out)))


def _namespace_seed(name: str) -> int:
    """Vowpal Wabbit's hash of a namespace: that of a feature without one."""
    text = np.frombuffer(name.encode(), np.uint8)
    words = kernel.TRAINER_HASH.make(algorithm=kernel.VOWPAL_WABBIT, rest=kernel.NO_REST, mask_bytes=-1)
    function = kernel.make_rows.address
    return int(kernel.call_make_rows(function, address_of(words), kernel.OF_ONE, address_of(text), len(text), 0, 0))
