"""What somebody types who has a script, and has never used this: on a terminal of 80 columns, in order.

The screens are kept in tests/golden/tour/; UPDATE_GOLDEN=1 writes them anew. What differs from one machine or second to
the next (ids, times, rates, paths) is replaced there, and gaps between columns, whose width depends on it, are two
blanks.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.shell import Shell, shell
from helpers.site import Site
from safetensors.numpy import load_file

FILES = Path(__file__).parent / "tour"
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tour"
COLUMNS, LINES = 80, 60
_VARIES = [
    # What older versions of MLflow print when they make their database.
    (re.compile(r"^INFO +\[alembic.*\n", re.MULTILINE), ""),
    (re.compile(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b"), "HASH"),
    (re.compile(r"\blocal-\w{6}\b"), "local-JOBJOB"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?"), "TIME"),
    (re.compile(r"\b((today|yesterday) )?\d\d:\d\d(:\d\d)?\b"), "TIME"),
    (re.compile(r"(?<![=.\d])\b\d+(\.\d+)? ?(ms|s|m|min|h)\b( \d+ ?s\b)?"), "SECONDS"),
    # What time was spent on has a line only if it was worth a word.
    (re.compile(r"^ *time .*\n", re.MULTILINE), ""),
    # What a machine's own checks find.
    (re.compile(r"^(  (clocks|checks|interface|nodes|master)) .*", re.MULTILINE), r"\1 ..."),
    (re.compile(r"^findings\n(  .*\n)+\n?", re.MULTILINE), ""),
    (re.compile(r"\b\d+(\.\d+)?/s\b"), "RATE"),
    # Whole blocks: a longer path in a plan can make it one more.
    (re.compile(r"\b\d+\.\d KiB\b"), "SIZE"),
    (re.compile(r" {2,}"), "  "),
    # How much of a cell there is room for depends on how long the others are.
    (re.compile(r"(?<=  )(\S+ )*\S*…"), "CUT"),
]


class Tour:
    """The shell, and the screens so far."""

    def __init__(self, typing: Shell, place: Path) -> None:
        self._shell = typing
        self._place = place
        self._ids: dict[str, str] = {}
        self.screens: dict[str, str] = {}

    def call(self, name: str, command: str, *answers: tuple[str, str]) -> str:
        """Type a command, and keep the screen under a name."""
        screen = self._shell.call(command, *answers)
        self.screens[name] = screen
        return screen

    def learn(self, word: str, *values: str) -> None:
        """What stands in golden screens for these ids."""
        self._ids |= {value: f"{word}{number}" for number, value in enumerate(values, start=1)}

    def compare(self) -> None:
        """Assert that the named screens are the golden ones."""
        screens = {name: self._without_what_varies(screen) for name, screen in self.screens.items() if name}
        if os.environ.get("UPDATE_GOLDEN"):
            shutil.rmtree(GOLDEN, ignore_errors=True)
            GOLDEN.mkdir(parents=True)
            for name, text in screens.items():
                (GOLDEN / f"{name}.txt").write_text(text)
        golden = {path.stem: path.read_text() for path in sorted(GOLDEN.iterdir())}
        assert screens.keys() == golden.keys(), "UPDATE_GOLDEN=1 writes the screens anew if this is meant"
        for name, screen in screens.items():
            changes = list(difflib.unified_diff(golden[name].splitlines(), screen.splitlines(), lineterm="", n=0))
            assert changes == [], f"{name}: UPDATE_GOLDEN=1 writes the screens anew if this is meant"

    def _without_what_varies(self, screen: str) -> str:
        text = screen.replace(self._place.name, "tour-AAAAAAAA")
        for value, word in self._ids.items():
            text = text.replace(value, word.ljust(len(value), "-"))
        for pattern, word in _VARIES:
            text = pattern.sub(word, text)
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.fixture
def site() -> Iterator[Site]:
    """A directory with a path that is always of the same length: it decides where lines of messages end."""
    path = Path(tempfile.mkdtemp(prefix="tour-", dir="/tmp"))
    place = Site(path)
    yield place
    place.end_all()
    shutil.rmtree(path)


@pytest.fixture
def tour(site: Site, tmp_path: Path) -> Iterator[Tour]:
    """A shell in a directory with a script and a spec that has two mistakes."""
    for path in FILES.iterdir():
        shutil.copy(path, site.path)
    env = {**site.environment(), "HOME": str(tmp_path)}
    with shell(columns=COLUMNS, lines=LINES, cwd=site.path, env=env) as typing:
        yield Tour(typing, site.path)


def test_a_new_users_tour(tour: Tour, site: Site) -> None:
    # Two mistakes, and what the messages say to do about them.
    assert "gpus_per_node" in tour.call("01-unknown-key", "slurmtrain submit exp.yaml")
    tour.call("", "sed -i 's/gpu: 0/gpus_per_node: 0/' exp.yaml")
    assert "you mean 'train.py'?" in tour.call("02-no-script", "slurmtrain submit exp.yaml")
    tour.call("", "sed -i 's/trian/train/' exp.yaml")

    # Six runs.
    sweep = "slurmtrain submit exp.yaml --sweep params.lr=0.1,0.5,2 --sweep params.seed=1,2"
    assert "waits" not in tour.call("03-submit", sweep)
    tour.call("", "slurmtrain wait 'points*' 2>/dev/null >/dev/null")
    runs = site.json("status")["runs"]
    assert [run["state"] for run in runs] == ["completed"] * 6
    assert {(run["params"]["lr"], run["params"]["seed"], run["step"]) for run in runs} == {
        (lr, seed, 20) for lr in (0.1, 0.5, 2) for seed in (1, 2)
    }
    tour.learn("run", *(run["id"] for run in runs))
    tour.learn("sweep", runs[0]["sweep"])
    tour.call("04-status", "slurmtrain status")

    # Which was best?
    [best] = site.json("best", runs[0]["sweep"], "--by", "metrics.acc")["runs"]
    assert best["metrics"]["acc"] == max(run["metrics"]["acc"] for run in runs)
    tour.call("05-best", "slurmtrain best points --by metrics.acc")
    tour.call("06-compare", f"slurmtrain compare {runs[0]['sweep']} --by metrics.acc")
    tour.call("07-plot", f"slurmtrain plot {runs[0]['sweep']} acc")

    # It trains for longer, from its newest checkpoint.
    tour.call("08-resume", f"slurmtrain resume {best['id']} params.steps=40 --wait")
    longer = site.json("show", best["id"])["run"]
    assert (longer["step"], longer["attempts"][1]["first_step"]) == (40, 20)
    tour.call("09-show", f"slurmtrain show {best['id']}")
    tour.call("10-export", f"slurmtrain export {best['id']} --to best.safetensors")
    assert sorted(load_file(site.path / "best.safetensors")) == ["step", "weights"]
    tour.call("11-tag", f"slurmtrain tag {best['id']} good && slurmtrain status --tag good")

    # What was of no use goes.
    useless = " ".join(run["id"] for run in runs if run["params"]["lr"] == 2)
    tour.call("12-delete", f"slurmtrain delete {useless}", ("[y/N]", "y"))
    tour.call("13-status", "slurmtrain status")
    tour.compare()
