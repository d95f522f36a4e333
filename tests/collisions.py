"""Strings that really have one XXH3-64 hash, seed 0, so that tests need no worse hash: in every process, over every wire.

`family` reaches into the algorithm for long inputs: a lane of 8 bytes of which one half equals the secret's adds nothing by
its product, so its other half only counts in a sum, and what one such lane has more another one may have less. `of_hash`
turns the one for 8 bytes around, which loses nothing of its input.
"""

from __future__ import annotations

import xxhash

_M = (1 << 64) - 1
_FLIP = 0x7C01812CF721AD1C, 0xDED46DE9839097DB  # the secret's bytes 8 to 24
_MIX = 0x9FB21C651E98DF25


def digest(text: str) -> int:
    """The hash of a key, as the store has it: int64."""
    value = int(xxhash.xxh3_64_intdigest(text.encode()))
    return value - (1 << 64) if value >> 63 else value


def family(count: int, salt: str = "a") -> list[str]:
    """`count` strings (at most 26) of 576 bytes that all have one hash, which `salt`, a letter, decides."""
    texts = [
        (salt * 56 + chr(97 + i) + "kk\xc1:&L" + "k" * 440 + chr(122 - i) + "kkk\u0374Y1" + "k" * 64)
        for i in range(count)
    ]
    assert len({digest(text) for text in texts}) == 1
    return texts


def of_hash(code: int) -> str | None:
    """The 8 bytes that have this hash, if they are text; one of two hundred is."""
    x = code & _M
    x ^= x >> 28 ^ x >> 56
    x = x * pow(_MIX, -1, 1 << 64) & _M
    x = _unshift(x)
    x = x * pow(_MIX, -1, 1 << 64) & _M
    x = _unrotate(x)
    flip = int.from_bytes(_FLIP[0].to_bytes(8, "big"), "little") ^ int.from_bytes(_FLIP[1].to_bytes(8, "big"), "little")
    x ^= flip
    data = (x >> 32).to_bytes(4, "little") + (x & 0xFFFFFFFF).to_bytes(4, "little")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    assert digest(text) == code
    return text


def pair(number: int = 0) -> tuple[str, str]:
    """Two short strings of one hash; another two for another number."""
    tried = number * 100_000
    while (other := of_hash(digest(f"key-{tried}"))) is None:
        tried += 1
    return f"key-{tried}", other


def _unshift(x: int) -> int:
    """Undo x ^= (x >> 35) + 8."""
    high = x >> 29  # of which the shifted part knows nothing
    for _ in range(3):
        high = x ^ ((high >> 35) + 8) & _M
    return high


def _unrotate(x: int) -> int:
    """Undo x ^= rotl(x, 49) ^ rotl(x, 24): a linear map whose 64th power is the identity."""
    for _ in range(63):
        x ^= _rotate(x, 49) ^ _rotate(x, 24)
    return x


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> 64 - bits) & _M
