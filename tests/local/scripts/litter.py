"""Leaves daemons behind and fails once; in the second round it looks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def start_daemons(pids: Path, mark: str) -> None:
    """Start two processes in sessions of their own, whose parents have ended.

    One does not have the environment of a rank, the other one ignores SIGTERM.
    """
    sleeper = f"echo $$ >> {pids}; exec -a {mark} sleep 1000"
    for command in (f"env -i setsid bash -c '{sleeper}'", f"trap '' TERM; setsid bash -c '{sleeper}'"):
        subprocess.run(["bash", "-c", f"({command} &)"], check=True)
    while len(pids.read_text().split() if pids.exists() else ()) < 2:
        pass


def main() -> None:
    folder = Path(sys.argv[1])
    first = folder / "first"
    if first.exists():
        survivors = [pid for pid in first.read_text().split() if Path(f"/proc/{pid}").exists()]
        print(f"survivors: {survivors}", flush=True)
        start_daemons(folder / "second", str(folder / "daemon"))
        return
    start_daemons(first, str(folder / "daemon"))
    # Without any progress a crash would end the run.
    (folder / "ckpt-1.txt").write_text("1")
    sys.exit(3)


if __name__ == "__main__":
    main()
