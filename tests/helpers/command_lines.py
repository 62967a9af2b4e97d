"""The command lines of all processes of this machine, as another user could watch them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Reads texts to look for, and notes the command lines that contain one, until its input ends.
_WATCHER = """
import json, os, select, sys
texts = [text.encode() for text in json.loads(sys.stdin.readline())]
lines = {}
print(flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    line = file.read()
            except OSError:
                continue
            for text in texts:
                if text in line:
                    lines.setdefault(text.decode(), set()).add(line.decode(errors="replace"))
print(json.dumps({text: sorted(lines) for text, lines in lines.items()}))
"""


@contextmanager
def command_lines_with(*texts: str) -> Iterator[dict[str, list[str]]]:
    """Watch all processes; at the end of the context, fill in the command lines that contained each of the texts."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdin is not None
    assert watcher.stdout is not None
    lines: dict[str, list[str]] = {}
    try:
        watcher.stdin.write(json.dumps(texts) + "\n")
        watcher.stdin.flush()
        watcher.stdout.readline()
        yield lines
        output, _ = watcher.communicate(timeout=60)
        lines.update(json.loads(output))
    finally:
        watcher.kill()
        watcher.communicate()
