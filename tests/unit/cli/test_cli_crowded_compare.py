"""Commands for many runs on terminals of any width: 30 long parameters, 200 runs of a sweep beside 15, wrong names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.crowded_root import SINGLE, SWEEP, SWEPT, crowd
from helpers.preloaded import shared
from helpers.terminal import on_terminal
from helpers.workspaces import make_workspace
from rich.cells import cell_len

from slurmtrain.model.run.run import RUN_STATES

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "crowded"
# Lines of the beginning of a comparison that the snapshot has.
_SHOWN = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("crowded") / "runs")
    crowd(workspace, params=30)
    return workspace.root.path


def screen(root: Path, width: int, *arguments: str, code: int = 0) -> list[str]:
    """What a command writes to a terminal, on its standard output and its standard error."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    called = shared().call("--runs", str(root), *arguments, cwd=root, env={**environment, "TERM": "xterm"},
                           stdout="terminal", size=(40, width))  # fmt: skip
    assert called.code == code, called.stdout
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", called.stdout).splitlines()]
    # Only a word that is longer than the terminal is wide is broken by it.
    assert all(cell_len(line) <= width or len(line.split()) == 1 for line in lines)
    return lines


def same_as_golden(lines: Sequence[str], name: str) -> bool:
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("".join(f"{line}\n" for line in lines))
    return [*lines] == golden.read_text().splitlines()


@pytest.mark.parametrize("width", [40, 80, 300])
def test_a_comparison_has_each_run_with_its_id_and_state_and_names_what_has_no_room(root: Path, width: int) -> None:
    lines = screen(root, width, "compare", "*", "--metrics", "loss")
    rows = [line.split() for line in lines if re.match(r"0000\d{6} ", line)]
    assert len({row[0] for row in rows}) == SWEPT + SINGLE + 8
    assert all(set(RUN_STATES) & {*row} for row in rows)
    [header] = [line for line in lines if line.startswith("ID ")]
    left_out = "".join("".join(lines[lines.index(header) + 1 + len(rows) :]).split()) + ","
    unnamed = [number for number in range(30) if f"in_block_{number}," not in left_out]
    assert len(unnamed) == sum(title.startswith("model") for title in header.split())
    assert all(name in header.split() or f"{name}," in left_out for name in ("lr", "bs", "epochs", "layers", "loss"))
    # Failed runs come behind all that have values, whatever these are.
    states = [next(word for word in row if word in RUN_STATES) for row in rows]
    assert "failed" not in states[: states.index("failed")]
    if width == 80:
        end = next(index for index, line in enumerate(lines) if line.startswith("no room"))
        assert same_as_golden([*lines[:_SHOWN], "...", *lines[end - _SHOWN // 2 :]], "compare")


def test_single_runs_side_by_side_keep_ids_and_states(root: Path) -> None:
    for width in (40, 80):
        lines = screen(root, width, "compare", "0000050002", "0000050004", "--metrics", "loss")
        together = "\n".join(lines)
        assert all(word in together for word in ("0000050002", "0000050004", "failed", "running"))


@pytest.mark.parametrize("width", [40, 300])
def test_wrong_names_are_answered_with_what_may_be_meant(root: Path, width: int) -> None:
    for arguments, answer in (
        (("show", "brt"), "error: there is no run 'brt'; did you mean 'bert'?"),
        (("compare", "zz*"), "error: no run matches 'zz*'; slurmtrain status --all lists them"),
        (("logs", "00000500"), "error: '00000500' is a prefix of 15 run ids: "),
        (("best", "cnn", "--by", "losss"), "did you mean 'loss'?"),
        (("compare", "cnn", "--where", "state = lost"), "at least two runs, and no run meets the conditions"),
    ):
        shown = " ".join(" ".join(screen(root, width, *arguments, code=2)).split())
        assert answer in shown, shown


def test_a_sweep_by_name_is_asked_about_before_it_is_cancelled_and_a_command_for_one_run_says_which(root: Path) -> None:
    with on_terminal("--runs", str(root), "cancel", "cnn") as terminal:
        terminal.wait_for("cancel these 42 runs? [y/N]")
        assert "and 22 more" in terminal.text
        terminal.press("n", "enter")
        assert terminal.wait_for_end() != 0
    shown = " ".join(screen(root, 40, "checkpoints", "cnn"))
    assert f"cnn: {SWEPT} runs of sweep {SWEEP}, and" in shown
    assert '(running); "slurmtrain status cnn"' in shown
