r"""Text from files, jobs and other programs, made safe to print. Pure.

A terminal executes control characters: they set its title or clipboard, move the cursor, or rewrite lines above. Some
invisible characters reorder what is displayed after them. Both are printed as escapes, such as ``\x1b``.
"""

from __future__ import annotations

import re

# Select Graphic Rendition: colours and the like (ECMA-48, 8.3.117).
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESETS = ("\x1b[m", "\x1b[0m")
# Whole sequences of other kinds: control sequences, and strings that set a title and the like (ECMA-48, 5.4 and 5.6).
_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)")
# Controls (C0 but for tabs, C1), characters that reorder or hide text, line separators, and halves of characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


# Characters of a cell, or of a line of a message, that people read; --json has what is longer as a whole.
LONGEST_CELL, LONGEST_LINE = 500, 2000


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and how much more there is; ``limit``: in characters."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def printable(text: str) -> str:
    """The text on one line, without colours, tabs as blanks, and everything that is not visible escaped."""
    if text.isprintable():
        return text
    return _escape(_COLOUR.sub("", text).expandtabs())


def printable_log(line: str) -> str:
    """A line of a program's output with its colours, as ``less -R`` shows it, and without other control sequences.

    Of a line that was overwritten with carriage returns, such as a progress bar, it is the last state.
    """
    line = line.rstrip("\r").rpartition("\r")[2].expandtabs()
    if line.isprintable():
        return line
    # The colours are at the odd places.
    parts = _COLOUR.split(_SEQUENCES.sub("", line))
    colours = parts[1::2]
    parts[0::2] = [_escape(part) for part in parts[0::2]]
    # A colour must not reach the next line.
    return "".join([*parts, *(_RESETS[1:] if colours and colours[-1] not in _RESETS else ())])


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
