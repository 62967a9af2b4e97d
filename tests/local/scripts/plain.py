"""A script that knows nothing of slurmtrain: counts steps, leaves checkpoints, takes one up again."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def main() -> None:
    out, steps, step_ms, resume = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    names = ("RUN_DIR", "CHECKPOINT_DIR", "RESUME_FROM", "ATTEMPT", "PARAMS", "RUN_ID")
    print(" ".join(f"{name}={os.environ['SLURMTRAIN_' + name]}" for name in names), flush=True)
    print(f"resumed from {resume[1]}" if resume else "from the start", flush=True)
    out.mkdir(exist_ok=True)
    first = int(Path(resume[1]).read_text()) if resume else 0
    for step in range(first, steps):
        threading.Event().wait(step_ms / 1000)
        if (step + 1) % 5 == 0:
            (out / "unfinished.tmp").write_text(str(step + 1))
            (out / "unfinished.tmp").replace(out / f"ckpt-{step + 1}.txt")
    print("done", flush=True)


if __name__ == "__main__":
    main()
