"""What the documents show can be done: commands of the tour, in order, and the runs on the pages about trainers."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.site import PATIENCE_S, Site

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "getting-started.md"
STEPS = PAGE.with_name("steps.md")
MIXED = PAGE.with_name("mixed-hardware.md")
TRAINERS = [REPOSITORY / "docs" / "trainers.md", *sorted((REPOSITORY / "docs" / "trainers").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Typed:
    """One command of the page, and the standard output that the page shows for it."""

    command: str
    shown: str


def typed(page: Path = PAGE) -> Iterator[Typed]:
    """The commands of the page's console blocks, in order."""
    for language, _, text in _BLOCK.findall(page.read_text()):
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield Typed(command, shown)


def save_files(place: Path, page: Path = PAGE) -> list[str]:
    """Write the files that a page asks its reader to save; returns their names."""
    names = []
    for language, name, text in _BLOCK.findall(page.read_text()):
        if name and language != "diff":
            (place / name).write_text(text)
            names.append(name)
    return names


def missing_libraries(place: Path, names: list[str]) -> list[str]:
    """What these files import and this interpreter does not have."""
    texts = [(place / name).read_text() for name in names if name.endswith(".py")]
    imported = {module for text in texts for module in _IMPORT.findall(text)}
    return sorted(module for module in imported if importlib.util.find_spec(module) is None)


def environment(place: Path) -> dict[str, str]:
    """This interpreter as ``python``, and ``slurmtrain`` also where the package is used without being installed."""
    programs = place / "bin"
    programs.mkdir()
    command = programs / "slurmtrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m slurmtrain "$@"\n')
    command.chmod(0o755)
    path = [str(Path(sys.executable).parent), str(programs), os.environ["PATH"]]
    packages = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(packages), "TERM": "dumb"}


@pytest.mark.slow
def test_the_commands_of_getting_started_print_what_the_page_shows(site: Site) -> None:
    shutil.copytree(REPOSITORY / "experiments", site.path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    assert save_files(site.path) == ["linear.py", "linear.yaml"]
    environ = environment(site.path)
    commands = list(typed())
    assert [step.command for step in commands if "resume" in step.command], "the page shows no resume"
    run_all(site, commands, environ)


@pytest.mark.slow
def test_the_commands_on_the_page_about_chains_print_what_it_shows(site: Site) -> None:
    page = PAGE.with_name("chains.md")
    assert "evaluate.yaml" in save_files(site.path, page)
    run_all(site, list(typed(page)), environment(site.path))


@pytest.mark.slow
def test_the_batch_script_on_the_page_about_sbatch_becomes_the_spec_that_it_shows(site: Site) -> None:
    page = PAGE.with_name("from-sbatch.md")
    assert set(save_files(site.path, page)) == {"job.sbatch", "train.py", "linear.yaml"}
    # What the batch script of the page activates.
    (site.path / "venv" / "bin").mkdir(parents=True)
    (site.path / "venv" / "bin" / "activate").touch()
    environ = environment(site.path)
    commands = list(typed(page))
    at = next(number for number, step in enumerate(commands) if "params.steps=2000" in step.command)
    run_all(site, commands[:at], environ)
    change_files(site.path, page)
    run_all(site, commands[at:], environ)


def change_files(place: Path, page: Path) -> None:
    """Change the files of a page as its differences show; a line ``...`` stands between their parts."""
    for name, text in re.findall(r"^```diff file=(\S+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        changed = (place / name).read_text()
        for part in text.split("...\n"):
            lines = [line or " " for line in part.splitlines()]
            before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] != sign) for sign in "+-")
            assert changed.count(before) == 1, before
            changed = changed.replace(before, after)
        (place / name).write_text(changed)


def run_all(site: Site, commands: list[Typed], environ: dict[str, str]) -> None:
    """Run commands of a page, each of which must print what the page shows; if that is an error, it must fail."""
    for step in commands:
        fails = step.shown.startswith("error: ")
        completed = subprocess.run(
            ["bash", "-c", step.command],
            cwd=site.path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if fails else subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (completed.returncode != 0) == fails, f"$ {step.command}\n{completed.stdout}\n{completed.stderr}"
        assert doctest.OutputChecker().check_output(step.shown, completed.stdout, _SAME), (
            f"$ {step.command}\nthe page shows\n{step.shown}\nbut it printed\n{completed.stdout}\n{completed.stderr}"
        )


def test_the_script_on_the_page_about_runs_divides_its_batch_when_it_does_not_fit(site: Site) -> None:
    assert {"divided.py", "divided.yaml"} <= {*save_files(site.path, PAGE.with_name("runs.md"))}
    script, spec, words = (
        site.path / "divided.py",
        str(site.path / "divided.yaml"),
        ("tracking.mlflow.enabled=false", "resources.procs_per_node=1"),
    )
    [whole] = site.json("submit", spec, *words, "--executor", "local", "--wait")["runs"]
    full = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")'
    computes = "loss = model(part)"
    fits = f"if step == 3 and len(part) > 16:\n                    {full}\n                {computes}"
    script.write_text(script.read_text().replace(computes, fits))
    [divided] = site.json("submit", spec, *words, "--executor", "local", "--wait")["runs"]
    run = site.show(divided["id"])
    assert [attempt["cause"] for attempt in run["attempts"]] == ["oom", "completed"]
    assert [attempt["overrides"] for attempt in run["attempts"]] == [[], ["resources.accumulation=2"]]
    assert run["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)


def test_the_script_on_the_page_about_data_evaluates_after_each_epoch_and_learns(site: Site) -> None:
    save_files(site.path, REPOSITORY / "docs" / "data.md")
    variables = {**environment(site.path), "OMP_NUM_THREADS": "1"}
    trained = subprocess.run(
        [sys.executable, "train.py"], cwd=site.path, env=variables, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert trained.returncode == 0, trained.stderr
    lines = trained.stdout.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
    errors = [float(line.split()[-1]) for line in lines]
    assert errors[2] < errors[0] / 4


@pytest.mark.slow
@pytest.mark.parametrize("page", [STEPS, MIXED, *TRAINERS], ids=lambda page: page.stem)
def test_the_runs_on_the_pages_about_steps_mixed_hardware_and_trainers_complete(site: Site, page: Path) -> None:
    names = save_files(site.path, page)
    specs = [name for name in names if name.endswith(".yaml")]
    assert specs, "the page shows no run"
    if missing := missing_libraries(site.path, names):
        pytest.skip(f"{', '.join(missing)} is not installed: scripts/bootstrap trainers")
    for spec in specs:
        [run] = site.json("submit", spec, "tracking.mlflow.enabled=false", "--executor", "local", "--wait")["runs"]
        log = site.call("logs", run["id"]).stdout
        assert run["state"] == "completed", log
        assert run["step"] == run["total_steps"] is not None, log
        assert run["checkpoint"]["complete"], log
        assert "loss" in run["metrics"]
        if page == MIXED:
            hardware = site.show(run["id"])["attempts"][-1]["hardware"]
            assert (hardware["backend"], hardware["backend_why"]) == ("gloo", "no process has a GPU")
