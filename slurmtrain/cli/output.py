r"""All that commands print, apart from tables and progress bars: lines for people, JSON, logs, warnings.

Nothing else writes to a terminal, since what is printed may come from files or jobs of other people. A terminal
executes control characters: they set its title or clipboard, move the cursor, or rewrite lines above. Some invisible
characters reorder what is displayed after them. Both are printed as escapes, such as ``\x1b``.
"""

from __future__ import annotations

import contextlib
import io
import json
import locale
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from slurmtrain.errors import OutputError
from slurmtrain.system.interpreter import is_utf8_by_option

if TYPE_CHECKING:
    from slurmtrain.ops.shared.observe import Observed

# Characters of a cell, or of a line of a message, that people read; --json has what is longer as a whole.
LONGEST_CELL, LONGEST_LINE = 500, 2000
# Narrower text is not readable; terminals that know no size of their own report 0.
_NARROWEST = 20
# Longer than paths that people copy.
_LONG_WORD = re.compile(rf"\S{{{LONGEST_CELL + 1},}}")
# So many runs are listed, before a person is asked about them and afterwards; of more, the first few.
_LISTED, _FEW = 20, 5
# Before all lines of a message but the first.
_INDENT = "  "


class _Page(NamedTuple):
    """What stands for the terminal while something is printed for a page that another program draws."""

    stream: io.StringIO
    width: int


# Each thread has its own.
_page: ContextVar[_Page | None] = ContextVar("page", default=None)


def attach_streams() -> None:
    """Make the standard streams usable, whatever this process has inherited.

    A closed one is replaced: otherwise the next file that is opened would get its number, and what a child prints. To a
    closed standard output, writing fails; to a closed standard error, it does nothing. Characters that a stream cannot
    encode are escaped.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            handle = os.open(os.devnull, flags)
            if handle != descriptor:
                os.dup2(handle, descriptor)
                os.close(handle)
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        # Tests replace them with streams of other kinds.
        if hasattr(stream, "reconfigure"):
            # A terminal has its locale's encoding, even if Python uses UTF-8 elsewhere.
            by_locale = is_utf8_by_option() and stream.isatty() and "PYTHONIOENCODING" not in os.environ
            encoding = locale.getencoding() if by_locale else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def discard_output() -> None:
    """If standard output cannot be written, discard its buffer, which Python would try to write at exit.

    A watch, for example, goes on if its output cannot be written.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def echo(*lines: str, err: bool = False) -> None:
    """Print lines, by default an empty one. Raises OutputError, BrokenPipeError.

    No line has more than LONGEST_LINE characters; on a terminal, long lines are wrapped between words.

    Args:
        *lines: The lines.
        err: Print to standard error.
    """
    if not err:
        lines = lines or ("",)
        # What continues a line is indented below it.
        indents = [" " * (len(line) - len(line.lstrip())) + _INDENT for line in lines]
        parts = [_wrapped(_short(line), sys.stdout, indent) for line, indent in zip(lines, indents, strict=True)]
        with _writing() as stream:
            stream.write("".join(f"{part}\n" for line in parts for part in line))
        return
    text = "".join(f"{part}\n" for line in lines or ("",) for part in _wrapped(_short(line), sys.stderr, _INDENT))
    # There is nowhere to say that this cannot be written.
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def verbatim(*lines: str) -> None:
    """Print lines whole: what other programs read, or people copy. Raises as :func:`echo`."""
    with _writing() as stream:
        stream.write("".join(f"{printable(line)}\n" for line in lines))


def document(text: str) -> None:
    """Print the content of a file as it is, in UTF-8 in any locale. Raises as :func:`echo`."""
    with _writing():
        sys.stdout.buffer.write(text.encode())


def paragraph(text: str, indent: str) -> None:
    """Print a line; on a terminal it is wrapped between words, with ``indent`` before all lines but the first.

    Elsewhere it stays one line, so that grep sees it whole.
    """
    verbatim(*_wrapped(_short(text), sys.stdout, indent))


def _short(text: str) -> str:
    """A text whose lines are all of a length that people read."""
    return "\n".join(shortened(line, LONGEST_LINE) for line in text.split("\n"))


def log_line(prefix: str, line: str) -> None:
    """Print a line of a log: as it is, or on a terminal without what would control it.

    ``line``: decoded with ``surrogateescape``, so that bytes which are not UTF-8 are kept. Raises as :func:`echo`.
    """
    with _writing() as stream:
        if stream.isatty():
            stream.write(f"{prefix}{printable_log(line)}\n")
        else:
            stream.buffer.write(f"{prefix}{line}\n".encode(errors="surrogateescape"))


def print_json(data: Mapping[str, Any], *, on_a_line: bool = False) -> None:
    """Print a JSON object to standard output: indented on a terminal, unless ``on_a_line``. Raises as :func:`echo`."""
    with _writing() as stream:
        # json.dump writes piece by piece, with an encoder in Python, which takes ten times as long.
        text = json.dumps(data, indent=1 if stream.isatty() and not on_a_line else None, allow_nan=False)
        stream.write(f"{text}\n")


def print_csv(rows: Iterable[Sequence[Any]], *, line_end: str = "\r\n") -> None:
    """Print lines of comma-separated values (RFC 4180), which end in ``line_end``. Raises as :func:`echo`."""
    import csv

    with _writing() as stream:
        if stream.isatty():
            rows = ([printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
        csv.writer(stream, lineterminator=line_end).writerows(rows)


def confirm(question: str) -> bool:
    """Ask a person, on standard error."""
    import click

    return click.confirm(printable(question), err=True)


def require_consent(question: str, lines: Sequence[str] = ()) -> None:
    """Ask a person, after the first of these ``lines``. Raises click.Abort if the answer to the ``question`` is no."""
    import click

    for line in lines[:_LISTED]:
        echo(line, err=True)
    if len(lines) > _LISTED:
        echo(f"and {len(lines) - _LISTED} more", err=True)
    if not confirm(question):
        raise click.Abort


def can_ask() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def note(text: str) -> None:
    """Print a line to standard error, unless it is empty."""
    if text:
        echo(text, err=True)


def few(items: Sequence[str], *, verbose: bool | None = None) -> list[str]:
    """All ``items`` if they are not very many, else the first few, and how many more there are.

    ``verbose``: whether all are wanted, as -v says; None: the command has no -v.
    """
    if verbose or len(items) <= _LISTED:
        return list(items)
    hint = "" if verbose is None else "; -v lists all"
    return [*items[:_FEW], f"and {len(items) - _FEW} more{hint}"]


def notes(lines: Iterable[str]) -> None:
    """Print ``lines`` to standard error."""
    for line in lines:
        note(line)


def warn(messages: Iterable[str]) -> None:
    """Print warnings to standard error."""
    for message in messages:
        echo(f"warning: {message}", err=True)


def warn_about(observed: Observed) -> None:
    """Warn about failed queries, unreadable runs, and unreadable lines of journals, which 'show --json' has."""
    warn(observed.warnings())


@contextlib.contextmanager
def collected(columns: int) -> Iterator[io.StringIO]:
    """Yield what this thread prints to standard output, instead of printing it: as for a terminal of these columns."""
    page = _Page(io.StringIO(), max(columns, _NARROWEST))
    token = _page.set(page)
    try:
        yield page.stream
    finally:
        _page.reset(token)


def is_collected() -> bool:
    """Whether what this thread prints is :func:`collected`."""
    return _page.get() is not None


def stdout() -> TextIO:
    """Where data is printed: standard output, or what is :func:`collected`."""
    page = _page.get()
    return sys.stdout if page is None else page.stream


def is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that can draw tables; also while output is :func:`collected`."""
    return is_collected() or (stream.isatty() and os.environ.get("TERM") != "dumb")


def width(stream: TextIO | None = None) -> int:
    """How many columns the terminal has; of a narrower one, as many as lines need to be readable.

    ``stream``: the terminal if standard output is none.
    """
    if page := _page.get():
        return page.width
    size = (80, 24)
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(stream.fileno())
    return max(get_terminal_size(size).columns, _NARROWEST)


def is_too_narrow() -> bool:
    """Whether the terminal has fewer columns than lines need to be readable."""
    return not is_collected() and get_terminal_size().columns < _NARROWEST


def _wrapped(line: str, stream: TextIO, indent: str) -> list[str]:
    """A line as it is printed to ``stream``: on a terminal wrapped between words, but not inside paths."""
    line = printable(line)
    if not is_terminal(stream) or len(line) <= (columns := width(stream)):
        return [line]
    from textwrap import wrap

    line = _LONG_WORD.sub(lambda word: shortened(word[0], LONGEST_CELL), line)
    return wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@contextlib.contextmanager
def _writing() -> Iterator[TextIO]:
    """Yield standard output, and flush it. Raises OutputError; BrokenPipeError if its reader is gone."""
    stream = stdout()
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"cannot write to standard output: {reason}; everything that the command did before is done"
        ) from error


# --- making text safe to print ----------------------------------------------------------------------------------------

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
