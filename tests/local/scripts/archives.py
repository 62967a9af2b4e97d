"""A script that saves archives such as torch.save writes, and fails at some steps: `last`, `spoiled` or `own`.

- `last`: one file without a number, rewritten; each attempt fails after some steps.
- `spoiled`: numbered directories, one of which is complete but cannot be loaded.
- `own`: finds its newest checkpoint itself.
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

# Words, since the numbers in a message do not tell failures apart.
WORDS = ("apple", "pear", "plum", "fig", "lime")


def save(path: Path, step: int, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path.with_name("unfinished.tmp"), "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"global_step": step, **more}))
    path.with_name("unfinished.tmp").replace(path)


def load(path: Path) -> int:
    print(f"loads {path}", flush=True)
    with zipfile.ZipFile(path) as archive:
        state = pickle.loads(archive.read("archive/data.pkl"))
    if state.get("spoiled"):
        raise RuntimeError("the state cannot be loaded")
    return int(state["global_step"])


def rewrite_last(out: Path, resume: list[str]) -> None:
    begin = load(Path(resume[0])) if resume else 0
    for step, word in zip((105, 172, 269), WORDS, strict=False):
        if begin < step:
            save(out / "last.pt", step)
            raise RuntimeError(f"failed by {word}")
    save(out / "last.pt", 300)


def leave_a_spoiled_one(out: Path, resume: list[str]) -> None:
    if not resume:
        save(out / "tag10" / "state.pt", 10)
        save(out / "tag20" / "state.pt", 20, spoiled=True)
        raise RuntimeError("failed after a save")
    directory, tag = resume
    names = ("RESUME_DIR", "RESUME_TAG")
    assert [os.environ[f"SLURMTRAIN_{name}"] for name in names] == [directory, tag]
    save(out / "tag30" / "state.pt", load(Path(directory) / tag / "state.pt") + 20)


def find_own(out: Path) -> None:
    assert os.environ["SLURMTRAIN_RESUME_FROM"] == ""
    saved = sorted(out.glob("ckpt-*.pt"))
    step = load(saved[-1]) if saved else 0
    print(f"begins at {step}", flush=True)
    save(out / f"ckpt-{step + 10}.pt", step + 10)
    if step == 0:
        raise RuntimeError("failed")


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    if mode == "own":
        find_own(Path(place))
    else:
        {"last": rewrite_last, "spoiled": leave_a_spoiled_one}[mode](Path(place), rest)
