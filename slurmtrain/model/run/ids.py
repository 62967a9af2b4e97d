"""Run ids: short, sortable by the time of submission, typeable, unique."""

from __future__ import annotations

import re

# Crockford's base 32 in lower case: no i, l, o or u, which are easily misread.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
EPOCH_MS = 1_577_836_800_000  # 2020-01-01T00:00:00Z
_TIME_DIGITS = 8  # 40 bits of milliseconds: until 2054
_RANDOM_DIGITS = 2
RUN_ID = re.compile(f"[{ALPHABET}]{{{_TIME_DIGITS + _RANDOM_DIGITS}}}")


def base32(value: int, digits: int) -> str:
    """``value`` in Crockford's base 32, with leading zeros."""
    return "".join(ALPHABET[value >> (5 * place) & 31] for place in reversed(range(digits)))


def run_id(now_ms: int, random_bits: int) -> str:
    """An id that sorts by ``now_ms`` (milliseconds since 1970); ``random_bits`` distinguish ids of one millisecond.

    Uniqueness is not guaranteed: the code that creates the run directory tries another id if it already exists.
    """
    return base32(max(0, now_ms - EPOCH_MS), _TIME_DIGITS) + base32(random_bits, _RANDOM_DIGITS)


def created_ms(name: str) -> int:
    """The time in a run's id, in milliseconds since 1970. Raises ValueError for other names."""
    value = 0
    for digit in name[:_TIME_DIGITS]:
        value = value << 5 | ALPHABET.index(digit)
    return value + EPOCH_MS
