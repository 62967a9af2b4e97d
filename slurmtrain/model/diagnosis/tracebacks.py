"""Which exception ended a Python program, and where in the user's own code, read from the program's last lines. Pure.

Programs print an exception with its traceback in one of these forms: Python's own, with the exceptions that it was
raised from or while handling; behind a prefix of torch's (``[rank0]:``) or of a launcher's; inside the message of
another exception, as data loaders, process pools and torch.multiprocessing hand on what a child raised; and as a stack
of faulthandler's, which has no exception. The log of a node has the lines of several ranks, mixed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

# Files that are not the user's: installed packages, Python's own modules, this package.
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<|/slurmtrain/(?:api|integrations|model|plugins|runtime|system)/"
)
# torch's excepthook and launchers put these before each line of a rank.
_PREFIX = re.compile(r"^(?:\[(?:rank|default)?(\d+)\]:? ?|(\d+): )+")
# The frame of an exception group.
_GROUP = re.compile(r"^ +[|+](?:-+ \d+ -+)? ?")
_HEADER = re.compile(r"^\s*(Original |Exception Group )?Traceback \(most recent call last\):")
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+)(?:,? in (.+))?$')
# rich draws a box instead.
_RICH_HEADER = re.compile(r"^╭─+ Traceback \(most recent call last\) ")
_RICH_FRAME = re.compile(r"^[│|] (/?\S+\.py):(\d+) in (\S+) ")
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*)|:?)$")
_FATAL = re.compile(r"^Fatal Python error: (.+)|^terminate called after throwing an instance of '(.+)'")
_DIRECT = "The above exception was the direct cause of the following exception:"
_HANDLING = "During handling of the above exception, another exception occurred:"
# What Python prints of exceptions that ended nothing.
_IGNORED = re.compile(r"^(?:Exception ignored |Error in atexit|--- Logging error ---|Exception in thread )")
# Exceptions whose message holds the traceback of a child: what the child raised is the error.
_WRAPPER = re.compile(r"Caught \w+ in |-- Process \d+ terminated with the following error|RemoteTraceback")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class TraceFrame:
    """A line of a program that a traceback names."""

    file: str
    line: int
    function: str = ""

    @property
    def is_library(self) -> bool:
        """Whether the file is not the user's."""
        return _LIBRARY.search(self.file) is not None


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that ended a program.

    ``kind``: its class, as printed. ``message``: the first line of its message. ``frames``: outermost first. ``cause``:
    the exception that it was raised from, or while handling: text, and which of both. ``begin``: the number of its
    traceback's first line.
    """

    kind: str
    message: str = ""
    frames: Sequence[TraceFrame] = ()
    cause: str = ""
    begin: int = 0

    @property
    def text(self) -> str:
        """Class and message, as Python prints them."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def own(self) -> TraceFrame | None:
        """The innermost frame in the user's code; None if there is none."""
        return next((frame for frame in reversed(self.frames) if not frame.is_library), None)

    @property
    def script(self) -> str:
        """The file that the program began with, as far as the traceback shows; empty if it does not."""
        return next((frame.file for frame in self.frames if not frame.is_library), "")

    def place(self, *, function: bool = False) -> str:
        """``train.py:31`` or, with ``function``, ``train.py:31 in step()``; empty if no frame is the user's.

        The file is written from the folder that it shares with the script.
        """
        if self.own is None:
            return ""
        inside = self.own.function
        where = f" in {inside}()" if function and inside and not inside.startswith("<") else ""
        path, base = PurePosixPath(self.own.file), PurePosixPath(self.script).parent
        # A shared folder says nothing once it is the root, or somebody's home.
        shared = [base, *(folder for folder in base.parents if len(folder.parts) > 3)]
        file = next((str(path.relative_to(each)) for each in shared if path.is_relative_to(each)), self.own.file)
        return f"{file}:{self.own.line}{where}"


@dataclass(slots=True)
class _Block:
    """A traceback that is being read. ``link``: how it relates to the one before."""

    begin: int
    link: str = ""
    ignored: bool = False
    frames: list[TraceFrame] = field(default_factory=list)
    kind: str = ""
    message: str = ""


def find_raised(lines: Sequence[str], error: str = "", rank: int | None = None) -> Raised | None:
    """The exception that ended a program, by the last ``lines`` of its log; None if they show none.

    Args:
        lines: Without line ends.
        error: Class and message of the exception, if they are known: only its traceback counts.
        rank: Whose lines count, if they say which rank has written them.
    """
    chains: list[Raised] = []
    # Number and text of the lines of each rank, without their prefix.
    by_writer: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        prefix = _PREFIX.match(line)
        text = _GROUP.sub("", line[prefix.end() :] if prefix else line)
        by_writer.setdefault((prefix[1] or prefix[2]) if prefix else "", []).append((number, text))
    if rank is not None and str(rank) in by_writer:
        by_writer = {writer: own for writer, own in by_writer.items() if writer in ("", str(rank))}
    for own in by_writer.values():
        chains += _chains(_blocks(own))
    chains.sort(key=lambda raised: raised.begin)
    kind = error.partition(":")[0].rpartition(".")[2]
    chosen = [each for each in chains if not error or each.kind.rpartition(".")[2] == kind]
    # Ranks of one log: the first one that raised an exception. One rank: its last one, which it did not survive.
    several = len(by_writer.keys() - {""}) > 1
    return (chosen[0] if several else chosen[-1]) if chosen else None


def _blocks(lines: Iterable[tuple[int, str]]) -> Iterator[_Block]:
    """The tracebacks among the lines of one program."""
    block: _Block | None = None
    link, before = "", ""
    for number, line in lines:
        header = _HEADER.match(line) or _RICH_HEADER.match(line)
        if header:
            if block is not None:
                yield block
                link = link or ("inside" if _WRAPPER.search(f"{block.kind}: {block.message}\n{before}") else "")
            block = _Block(number, link, ignored=_IGNORED.match(before) is not None)
            link = ""
        elif frame := _FRAME.match(line) or _RICH_FRAME.match(line):
            if block is None or block.kind:
                # A syntax error in the script itself has no header; nor do stacks of faulthandler's.
                if block is not None:
                    yield block
                block, link = _Block(number, link, ignored=before.startswith(("Current thread", "Thread "))), ""
            block.frames.append(TraceFrame(frame[1], int(frame[2]), frame[3] or ""))
        elif line in (_DIRECT, _HANDLING):
            link = "from" if line == _DIRECT else "while handling"
        elif block is not None:
            _add(block, line)
        before = line if line.strip() else before
    if block is not None:
        yield block


def _add(block: _Block, line: str) -> None:
    """Take a line that follows the frames of a traceback: the exception, or the next line of its message."""
    error = _ERROR.match(line)
    if not block.kind and block.frames and error:
        block.kind, block.message = error[1], (error[2] or "").strip()
    # Messages such as load_state_dict's are lists under a title.
    elif block.kind and line.strip() and (not block.message or block.message.endswith(":")):
        block.message = f"{block.message} {line.strip()}".strip()


def _chains(blocks: Iterable[_Block]) -> Iterator[Raised]:
    """One exception for each chain of tracebacks, in order."""
    current: Raised | None = None
    for block in blocks:
        if not block.kind or block.ignored:
            continue
        raised = Raised(block.kind, block.message[:_LONGEST], tuple(block.frames), begin=block.begin)
        if current is None or not block.link:
            if current is not None:
                yield current
            current = raised
        else:
            current = _joined(current, raised, block.link)
    if current is not None:
        yield current


def _joined(before: Raised, raised: Raised, link: str) -> Raised:
    """What a chain of two tracebacks says: ``raised`` follows ``before``."""
    if link == "inside" or before.text == raised.text:
        # A child's exception, and the one by which its parent got it: the child's has the frames that matter.
        child, parent = (raised, before) if link == "inside" else (before, raised)
        return replace(child, frames=(*parent.frames, *child.frames), cause=before.cause, begin=before.begin)
    return replace(raised, cause=f"{link} {before.text}", begin=before.begin)


# --- stacks of processes that a signal has killed --------------------------------------------------------------------


def find_fatal(lines: Sequence[str]) -> tuple[str, Raised]:
    """What a process that a signal has killed said of itself, and its stack if faulthandler has printed it.

    Args:
        lines: The last lines of its log.
    """
    frames: list[TraceFrame] = []
    message, is_current = "", False
    for line in (_PREFIX.sub("", line) for line in lines):
        if match := _FATAL.match(line):
            message, frames = match[1] or match[2], []
        elif message and line.startswith("  what(): "):
            message = f"{message}: {line[10:].strip()}"
        elif is_current and (frame := _FRAME.match(line)):
            frames.append(TraceFrame(frame[1], int(frame[2]), frame[3] or ""))
        else:
            is_current = line.startswith("Current thread ")
    return message, Raised("", frames=tuple(reversed(frames)))
