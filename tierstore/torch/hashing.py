"""`HashKeys`: keys as row numbers within a module, as a served feature with a hash makes
them (`formats/key_hash.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierstore.errors import InvalidInput
from tierstore.formats.key_hash import FLIPPED, MULTIPLIER, seed_bits
from tierstore.formats.snapshot.manifest import HashEntry
from tierstore.types import KeyHash


class HashKeys(nn.Module):  # type: ignore[misc, unused-ignore]
    """Row numbers, 0 to `mod` - 1, of 64-bit keys: what goes between an argument of `forward` and a table.

    Without a seed `keys % mod`; with one their XXH3-64 with that seed, modulo `mod`. Called with a tensor of integers
    of any shape, or with a KeyedJaggedTensor of TorchRec. `write_snapshot` has the served feature do the same, so that
    requests have the keys themselves.
    """

    def __init__(self, mod: int, seed: int | None = None) -> None:
        super().__init__()
        try:
            HashEntry(mod=mod, seed=seed)
        except ValueError as error:
            raise InvalidInput(f"expected mod 1 to 2^62 and seed 0 to 2^64 - 1, got {mod!r} and {seed!r}") from error
        self.how = KeyHash(mod, seed)

    def forward(self, keys: Any) -> Any:
        if hasattr(keys, "to_dict"):
            lengths, weights = keys.lengths(), keys.weights_or_none()
            return type(keys)(keys.keys(), self._rows(keys.values()), weights=weights, lengths=lengths)
        return self._rows(keys)

    def _rows(self, keys: torch.Tensor) -> torch.Tensor:
        if keys.is_floating_point() or keys.is_complex() or keys.dtype is torch.bool:
            raise InvalidInput(f"expected integer keys, got {keys.dtype}")
        codes, mod = keys.long(), self.how.mod
        if self.how.seed is None:
            return _unsigned_rest(codes, mod) if keys.dtype is torch.uint64 else codes % mod
        x = codes ^ _signed(seed_bits(self.how.seed))
        # XXH3-64 of eight bytes; products and shifts to the left wrap around
        x = ((x << 32) | _shifted(x, 32)) ^ _signed(FLIPPED)
        x = x ^ ((x << 49) | _shifted(x, 15)) ^ ((x << 24) | _shifted(x, 40))
        x = x * _signed(MULTIPLIER)
        x = (x ^ (_shifted(x, 35) + 8)) * _signed(MULTIPLIER)
        x = x ^ _shifted(x, 28)
        return _unsigned_rest(x, mod)

    def extra_repr(self) -> str:
        return f"mod={self.how.mod}, seed={self.how.seed}"


def _unsigned_rest(x: torch.Tensor, mod: int) -> torch.Tensor:
    """Of the bits as a number without a sign."""
    return (x % mod + (x < 0) * ((1 << 64) % mod)) % mod


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
