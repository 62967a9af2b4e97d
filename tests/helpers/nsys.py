"""A stand-in for nsys, which needs an NVIDIA driver."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """#!/bin/sh
# Notes how it is called, writes a report, and becomes the command.
echo "$@" >> "$NSYS_CALLS"
shift
while :; do
  case $1 in
    -o) report=$(echo "$2" | sed "s/%q{RANK}/$RANK/"); shift 2;;
    --*) shift;;
    *) break;;
  esac
done
echo report > "$report.nsys-rep"
exec "$@"
"""


def write_nsys(folder: Path) -> Path:
    """Make a program called nsys in a new ``folder``, for PATH; it appends its arguments to the file $NSYS_CALLS."""
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(_SCRIPT)
    program.chmod(0o755)
    return program
