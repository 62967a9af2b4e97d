"""Names and texts that have a meaning to shells, patterns, formats or databases, drawn at random."""

from __future__ import annotations

import os
import random

# How many are drawn, and which.
NAMES = int(os.environ.get("TEST_NAMES", "20"))
SEED = int(os.environ.get("TEST_NAMES_SEED", "0"))
_PARTS = [
    "%", "%j", "%A_%a", "%%", "%(x)s", "\\", "\\n", "'", '"', "`x`", "$HOME", "$(id)", "${HOME}", "!", "#", "?", "*",
    "[a-z]", "[bold]", "{x}", "{run_id}", "|", "||", ";", "&&", ">", "<", "~", ":", ": ", "//", "../", ",", "=", "@",
    " ", "\t", "0123", "1e3", "1_000", "yes", "null", "~", "-", "--", "- ", "12:30", "é", "日本", "\U0001f600",
    "\u202e", "a", "B", "_", "\x7f", "\u00a0", "%s", "{}", "\u2028", "file:", "sqlite:///", "(?P<", "$", "^", "+",
]  # fmt: skip
# What nobody can write into a spec or a command line, but a script into the names of its metrics.
_LINE_ENDS = [
    "\r",
    "\n",
    "\r\n",
    "\n7,",
    "\v",
    "\x85",
    "\x00",
    "\x1b",
    "\u2029",
    '""',
    "/",
    ".",
    "..",
    "_",
    "K",
    "\u212a",
]


def draw(generator: random.Random) -> str:
    """Up to five parts that mean something somewhere."""
    return "".join(generator.choices(_PARTS, k=generator.randint(1, 5)))


def draw_names(count: int) -> list[str]:
    """Different names that also have ends of lines and control characters in them."""
    generator, parts = random.Random(SEED), [*_PARTS, *_LINE_ENDS]
    return list(dict.fromkeys("".join(generator.choices(parts, k=generator.randint(1, 5))) for _ in range(count)))
