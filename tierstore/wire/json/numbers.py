"""Numbers of JSON, read and written.

A float is read as the double nearest to its text, as parsers of JSON do; its datatype may round it once more. Texts that this module does not decide,
such as those in the middle between two doubles, are for the full parser. A float is written with the fewest digits that are read back as itself.

Sources: W. Clinger, How to read floating point numbers accurately (1990), for short texts; D. Lemire, Number parsing at a gigabyte per second (2021),
for a table of powers of five; R. Giulietti, The Schubfach way to render doubles (2021), for writing.

Free functions of addresses, nogil. `tests/wire/test_json_numbers.py` compares with orjson and NumPy.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.raw import f64_of_bits, leading_zeros, load_u8, multiply_high, store_u8, store_u64

_U64 = np.uint64
_MINUS, _PLUS, _POINT, _ZERO, _SMALL_E, _LARGE_E = b"-+.0eE"
_ALL_ONES = (1 << 64) - 1

# --- tables


def _power(base: int, k: int, bits: int, *, up: bool) -> int:
    """The first bits of base^k, rounded down or up."""
    power: int = base ** abs(k)
    spare = bits - power.bit_length()
    above, below = (
        (power << max(spare, 0), 1 << max(-spare, 0)) if k >= 0 else (1 << (bits + power.bit_length() - 1), power)
    )
    whole, left = divmod(above, below)
    return whole + (up and left > 0)


_EXACT = 10.0 ** np.arange(23)  # the powers of ten that are doubles
_MOST_EXACT = 1 << 53  # a double has all integers up to here
_MOST_POWER = 65  # of ten. Results are normal doubles, so that none is rounded twice
_MOST_WHOLE = 55  # 5^55 has no more than 128 bits
_FIVES = [_power(5, k, 128, up=False) for k in range(-_MOST_POWER, _MOST_POWER + 1)]
_UPPER = np.array([power >> 64 for power in _FIVES], np.uint64)
_LOWER = np.array([power & _ALL_ONES for power in _FIVES], np.uint64)

_FIRST_TEN, _LAST_TEN = -31, 45  # the powers by which a float32 is multiplied to be written
_TENS = np.array([_power(10, k, 64, up=True) for k in range(_FIRST_TEN, _LAST_TEN + 1)], np.uint64)
_FIRST_LONG_TEN, _LAST_LONG_TEN = -292, 324  # and a double, in two words
_LONG_TENS = [_power(10, k, 128, up=True) for k in range(_FIRST_LONG_TEN, _LAST_LONG_TEN + 1)]
_UPPER_TENS = np.array([power >> 64 for power in _LONG_TENS], np.uint64)
_LOWER_TENS = np.array([power & _ALL_ONES for power in _LONG_TENS], np.uint64)
_COUNTS = 10 ** np.arange(20, dtype=np.uint64)

# --- reading

_MOST_DIGITS = 19  # that any word of 64 bits has room for


@nb.njit
def integer_at(text, i, n):
    """(whether it has a minus, its magnitude, what follows) of the integer at `i`; -1 follows for another form, or one above 64 bits."""
    minus = i < n and load_u8(text, i) == _MINUS
    if minus:
        i += 1
    first, value = i, _U64(0)
    while i < n:
        digit = _U64(load_u8(text, i)) - _U64(_ZERO)
        if digit > _U64(9):
            break
        if i - first >= _MOST_DIGITS and (i - first > _MOST_DIGITS or value > (_U64(_ALL_ONES) - digit) // _U64(10)):
            return minus, value, nb.int64(-1)
        value = value * _U64(10) + digit
        i += 1
    if i == first or (i - first > 1 and load_u8(text, first) == _ZERO):
        return minus, value, nb.int64(-1)
    return minus, value, i


@nb.njit
def _digits(text, i, n, value, used):
    """Read digits behind `used` significant ones that make `value`. Returns (the value with them, how many are significant, what follows)."""
    while i < n:
        digit = _U64(load_u8(text, i)) - _U64(_ZERO)
        if digit > _U64(9):
            break
        if used > 0 or digit != _U64(0):
            used += 1
        value = value * _U64(10) + digit
        i += 1
    return value, used, i


@nb.njit
def _nearest(value, power):
    """The double nearest to value · 10^power, for a value above 0; -1.0 where this does not decide it."""
    if value <= _U64(_MOST_EXACT) and -23 < power < 23:
        return nb.float64(value) * _EXACT[power] if power >= 0 else nb.float64(value) / _EXACT[-power]
    shift = leading_zeros(value)
    value <<= shift
    # the product with the 128 bits of the power of five: 192 bits
    upper, lower = _UPPER[power + _MOST_POWER], _LOWER[power + _MOST_POWER]
    high, middle = multiply_high(value, upper), value * upper
    more, low = multiply_high(value, lower), value * lower
    middle += more
    if middle < more:
        high += _U64(1)
    # a double has the first 53 of them
    drop = _U64(10) + (high >> _U64(63))
    kept, half = high >> drop, _U64(1) << (drop - _U64(1))
    dropped = high & (half + half - _U64(1))
    if power < 0 or power > _MOST_WHOLE:
        # what the power lacks makes the product larger, by less than `value`
        if dropped == half - _U64(1) and middle == _U64(_ALL_ONES) and low + value < low:
            return -1.0
        kept += _U64(dropped >= half)
    elif dropped == half and middle == _U64(0) and low == _U64(0):
        kept += kept & _U64(1)  # in the middle between two: the even one
    else:
        kept += _U64(dropped >= half)
    exponent = ((217706 * power) >> 16) + nb.int64(drop) - nb.int64(shift) + 53  # 217706 / 2^16 is log2(10)
    return f64_of_bits((_U64(exponent + 1023) << _U64(52)) + kept - (_U64(1) << _U64(52)))


@nb.njit
def float_at(text, i, n):
    """(the double nearest to the number at `i`, what follows); the latter is -1 for another form, and where the full parser must decide."""
    minus = i < n and load_u8(text, i) == _MINUS
    if minus:
        i += 1
    first = i
    value, used, i = _digits(text, i, n, _U64(0), 0)
    if i == first or (i - first > 1 and load_u8(text, first) == _ZERO):
        return 0.0, nb.int64(-1)
    power, is_integer = nb.int64(0), True
    if i < n and load_u8(text, i) == _POINT:
        first, is_integer = i + 1, False
        value, used, i = _digits(text, first, n, value, used)
        power = first - i
        if power == 0:
            return 0.0, nb.int64(-1)
    if i < n and (load_u8(text, i) == _SMALL_E or load_u8(text, i) == _LARGE_E):
        i, is_integer = i + 1, False
        below = i < n and load_u8(text, i) == _MINUS
        if below or (i < n and load_u8(text, i) == _PLUS):
            i += 1
        first = i
        exponent, _, i = _digits(text, i, n, _U64(0), 0)
        if i == first or i - first > 4:
            return 0.0, nb.int64(-1)
        power += -nb.int64(exponent) if below else nb.int64(exponent)
    if used > _MOST_DIGITS or power < -_MOST_POWER or power > _MOST_POWER:
        return 0.0, nb.int64(-1)
    number = _nearest(value, power) if value != _U64(0) else 0.0
    if number < 0:
        return 0.0, nb.int64(-1)
    return -number if minus and not (is_integer and value == _U64(0)) else number, i  # the integer -0 has no sign


# --- writing

_FIRST_FIXED, _LAST_FIXED = -6, 12  # exponents of float32 that are written without one
_FIRST_FIXED_64, _LAST_FIXED_64 = -5, 15  # of doubles
_BEFORE = int.from_bytes(b"0.000000", "little")  # in front of the digits of a number below 1


@nb.njit(inline="always")
def _scaled(ten, number):
    """The product's upper half, odd where anything is cut off."""
    return multiply_high(ten, number) | _U64((ten * number) >> _U64(32) > _U64(1))


@nb.njit
def _shortest(bits):
    """(digits, power of ten) of the shortest number that is read as the positive float32 with these bits."""
    fraction, exponent = bits & _U64(0x7FFFFF), nb.int64(bits >> _U64(23))
    number, power = fraction | _U64(0x800000), exponent - 150
    if exponent == 0:
        number, power = fraction, nb.int64(-149)
    odd = number & _U64(1)
    uneven = fraction == _U64(0) and exponent > 1  # the next lower float is closer than the next higher one
    k = (power * 1262611 - (524031 if uneven else 0)) >> 22
    ten, shift = _TENS[-k - _FIRST_TEN], _U64(power + ((-k * 1741647) >> 19) + 1)
    middle = _scaled(ten, (number << _U64(2)) << shift)
    lower = _scaled(ten, ((number << _U64(2)) - _U64(1 if uneven else 2)) << shift) + odd
    upper = _scaled(ten, ((number << _U64(2)) + _U64(2)) << shift) - odd
    return _fewest(middle, lower, upper, k)


@nb.njit
def _fewest(middle, lower, upper, k):
    """(digits, power of ten) of the shortest number between two bounds. Those and the number itself are four times as large as its digits at 10^k."""
    digits = middle >> _U64(2)
    if digits >= _U64(10):
        fewer = digits // _U64(10)
        under, over = lower <= _U64(40) * fewer, _U64(40) * fewer + _U64(40) <= upper
        if under != over:
            return fewer + _U64(over), k + 1
    under, over = lower <= digits << _U64(2), (digits << _U64(2)) + _U64(4) <= upper
    if under != over:
        return digits + _U64(over), k
    half = (digits << _U64(2)) + _U64(2)
    return digits + _U64(middle > half or (middle == half and digits & _U64(1) != _U64(0))), k


@nb.njit(inline="always")
def _long_scaled(upper, lower, number):
    """The upper word of the product with two words, odd where anything is cut off."""
    middle = upper * number + multiply_high(lower, number)
    high = multiply_high(upper, number) + _U64(middle < upper * number)
    return high | _U64(middle > _U64(1))


@nb.njit
def _shortest_64(bits):
    """`_shortest` of a double."""
    fraction, exponent = bits & _U64(0xFFFFFFFFFFFFF), nb.int64(bits >> _U64(52))
    number, power = fraction | _U64(0x10000000000000), exponent - 1075
    if exponent == 0:
        number, power = fraction, nb.int64(-1074)
    odd = number & _U64(1)
    uneven = fraction == _U64(0) and exponent > 1
    k = (power * 1262611 - (524031 if uneven else 0)) >> 22
    upper_ten, lower_ten = _UPPER_TENS[-k - _FIRST_LONG_TEN], _LOWER_TENS[-k - _FIRST_LONG_TEN]
    shift, four = _U64(power + ((-k * 1741647) >> 19) + 1), number << _U64(2)
    middle = _long_scaled(upper_ten, lower_ten, four << shift)
    lower = _long_scaled(upper_ten, lower_ten, (four - _U64(1 if uneven else 2)) << shift) + odd
    upper = _long_scaled(upper_ten, lower_ten, (four + _U64(2)) << shift) - odd
    return _fewest(middle, lower, upper, k)


@nb.njit
def _count(value):
    """The number of digits of a value above 0."""
    least = ((64 - nb.int64(leading_zeros(value))) * 1233) >> 12  # 1233 / 2^12 is log10(2)
    return least + nb.int64(value >= _COUNTS[least])


@nb.njit(inline="always")
def _eight_digits(value):
    """The eight digits of a value below 10^8, a byte each, the first in the lowest byte: halves are cut until each byte is a digit."""
    value = value // _U64(10_000) | (value % _U64(10_000)) << _U64(32)
    above = ((value * _U64(5243)) >> _U64(19)) & _U64(0x0000007F_0000007F)  # a hundredth of each half
    value = above | (value - above * _U64(100)) << _U64(16)
    above = ((value * _U64(103)) >> _U64(10)) & _U64(0x000F000F_000F000F)  # a tenth of each quarter
    return above | (value - above * _U64(10)) << _U64(8)


@nb.njit
def write_integer(at, minus, value):
    """Write an integer with its sign and magnitude. Returns what follows."""
    if minus:
        store_u8(at, 0, nb.uint8(_MINUS))
        at += 1
    n = _count(value) if value != _U64(0) else 1
    for i in range(n - 1, -1, -1):
        store_u8(at, i, nb.uint8(_U64(_ZERO) + value % _U64(10)))
        value //= _U64(10)
    return at + n


@nb.njit(inline="always")
def _zeros(at, n):
    for i in range(n):
        store_u8(at, i, nb.uint8(_ZERO))
    return at + n


@nb.njit
def _zero(at):
    """Write 0.0."""
    at = _zeros(at, 1)
    store_u8(at, 0, nb.uint8(_POINT))
    return _zeros(at + 1, 1)


@nb.njit
def _exponent(at, exponent):
    """Write the exponent of a number."""
    store_u8(at, 0, nb.uint8(_SMALL_E))
    store_u8(at, 1, nb.uint8(_MINUS if exponent < 0 else _PLUS))
    return write_integer(at + 2, False, _U64(abs(exponent)))


@nb.njit
def write_float64(at, bits):
    """Write the finite double with these bits. Returns what follows."""
    store_u8(at, 0, nb.uint8(_MINUS))
    at += nb.int64(bits >> _U64(63))
    bits &= _U64(0x7FFFFFFF_FFFFFFFF)
    if bits == _U64(0):
        return _zero(at)
    digits, power = _shortest_64(bits)
    while digits % _U64(10) == _U64(0):
        digits //= _U64(10)
        power += 1
    n = _count(digits)
    exponent = power + n - 1
    if 0 <= exponent <= _LAST_FIXED_64 and n <= exponent + 1:
        at = _zeros(write_integer(at, False, digits), exponent + 1 - n)
        store_u8(at, 0, nb.uint8(_POINT))
        return _zeros(at + 1, 1)
    if _FIRST_FIXED_64 <= exponent < 0:
        at = _zeros(at, 1)
        store_u8(at, 0, nb.uint8(_POINT))
        return write_integer(_zeros(at + 1, -1 - exponent), False, digits)
    is_fixed = 0 <= exponent <= _LAST_FIXED_64
    before = exponent + 1 if is_fixed else 1  # digits in front of the point
    write_integer(at + 1, False, digits)
    for i in range(before):
        store_u8(at, i, load_u8(at, i + 1))
    store_u8(at, before, nb.uint8(_POINT))
    at += n + 1 if n > before else before
    return at if is_fixed else _exponent(at, exponent)


@nb.njit
def write_float32(at, bits):
    """Write the finite float32 with these bits. Returns what follows; of 24 bytes any may be written to."""
    store_u8(at, 0, nb.uint8(_MINUS))
    at += nb.int64(bits >> _U64(31))  # written over unless there is a sign
    bits &= _U64(0x7FFFFFFF)
    if bits == _U64(0):
        return _zero(at)
    digits, power = _shortest(bits)
    n = _count(digits)
    exponent = power + n - 1
    # nine digits: the first one, and eight in a word, of which those behind the last that is not 0 are not needed
    digits *= _COUNTS[9 - n]
    first, others = digits // _U64(100_000_000), _eight_digits(digits % _U64(100_000_000))
    n = 1 if others == _U64(0) else 9 - (nb.int64(leading_zeros(others)) >> 3)
    first, others = nb.uint8(_U64(_ZERO) + first), others + _U64(0x30303030_30303030)
    if exponent < _FIRST_FIXED or exponent > _LAST_FIXED:
        store_u8(at, 0, first)
        store_u64(at + 2, 0, others)
        if n > 1:
            store_u8(at, 1, nb.uint8(_POINT))
            at += 1
        return _exponent(at + n, exponent)
    if exponent < 0:
        store_u64(at, 0, _U64(_BEFORE))
        at += 1 - exponent
        store_u8(at, 0, first)
        store_u64(at + 1, 0, others)
        return at + n
    store_u8(at, 0, first)
    store_u64(at + 1, 0, others)
    if n <= exponent + 1:
        at = _zeros(at + n, exponent + 1 - n)
        store_u8(at, 0, nb.uint8(_POINT))
        return _zeros(at + 1, 1)
    store_u64(at + exponent + 2, 0, others >> _U64(8 * exponent))
    store_u8(at, exponent + 1, nb.uint8(_POINT))
    return at + n + 1
