"""Counts to 30 and tells so, as scripts do that know nothing of slurmtrain; fails once after 17, resumes from tens.

``counting.py DIRECTORY log|csv``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

directory, output = Path(sys.argv[1]), sys.argv[2]
directory.mkdir(exist_ok=True)
state, table = directory / "state", directory / "metrics.csv"
first = int(state.read_text()) if state.exists() else 0
if output == "csv" and not table.exists():
    table.write_text("iter,loss\n")
for step in range(first + 1, 31):
    time.sleep(0.01)
    if output == "csv":
        with table.open("a") as file:
            file.write(f"{step},{1 / step}\n")
    else:
        # As progress bars do, and sometimes with a line break.
        print(f"step {step}/30 loss={1 / step:.4f}, fine", end="\r" if step % 4 else "\n", flush=True)
    if step % 10 == 0:
        (directory / "state.tmp").write_text(str(step))
        (directory / "state.tmp").rename(state)
    if step == 17 and not first:
        sys.exit(3)
