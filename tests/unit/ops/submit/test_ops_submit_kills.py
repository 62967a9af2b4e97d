"""SIGKILL at any effect of ``submit`` with an idempotency key: the same command again completes it, once.

By default a few points are tried; TEST_KILLS=all tries every one.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.forked_commands import CommandLine, Ended, run_forked
from helpers.site import until

from slurmtrain.model.run.layout import RUN_ID, RunsRoot
from slurmtrain.runtime.upstreams import read_upstreams


@dataclass
class Submitter:
    """Submits a sweep of two runs, and a run that starts after it, to a fake Slurm, and dies at a chosen effect."""

    path: Path
    slurm: SlurmCommands
    spec: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def submit(self, key: str, *, kill_at: int = 0) -> Ended:
        log = self.path / "effects"
        log.unlink(missing_ok=True)
        specs = [str(self.spec.with_name("after.yaml")), str(self.spec)]
        arguments = ["submit", *specs, "--executor", "slurm", "--json", "--idempotency-key", key]
        environ = {**os.environ, "SLURMTRAIN_RUNS": str(self.runs)}
        kill = {"KILL_AT": str(kill_at), "KILL_ROOT": str(self.runs), "KILL_LOG": str(log)}
        return run_forked(
            CommandLine(arguments=arguments, cwd=Path.cwd(), environ=environ, limit_s=60, kill=kill, umask=0o077)
        )

    def effects(self) -> list[str]:
        return (self.path / "effects").read_text().splitlines()

    def let_launchers_end(self) -> None:
        """Wait for what a killed command has left, and may still submit; then squeue knows all jobs."""
        until(lambda: not self._launchers(), "the end of all launchers")
        lines = []
        for number, call in enumerate(self.slurm.calls("sbatch"), 8):
            place = Path(call.cwd)
            if place.parent.name == "arrays":
                lines += [squeue_line(f"{number}_{index}", run_id=place.name) for index in range(len(_elements(place)))]
            else:
                lines.append(squeue_line(f"{number}", run_id=place.parts[-3], name="y"))
        self.slurm.replies("squeue", "".join(lines))

    def submitted(self) -> list[str]:
        """The run of each job that sbatch was called for."""
        return sorted(run for call in self.slurm.calls("sbatch") for run in _elements(Path(call.cwd)))

    def _launchers(self) -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if self._is_launcher(path)]

    def _is_launcher(self, path: Path) -> bool:
        try:
            command = path.read_bytes()
        except OSError:
            return False  # it has ended
        return b"slurmtrain.slurm.sbatch_process" in command and str(self.runs).encode() in command


def _elements(place: Path) -> list[str]:
    """The runs of a call of sbatch, by the directory that it was called in."""
    if place.parent.name != "arrays":
        return [place.parts[-3]]
    return [link.readlink().parts[-3] for link in (place / "elements").iterdir()]


@pytest.fixture
def submitter(tmp_path: Path, slurm: SlurmCommands, spec: Path, monkeypatch: pytest.MonkeyPatch) -> Submitter:
    # Other commands look for launchers by their command line.
    monkeypatch.setattr("slurmtrain.slurm.slurm_launch.subprocess", subprocess)
    # A directory of its own, in which nothing changes: each submission has the same effects.
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    spec.with_name("after.yaml").write_text(spec.read_text().replace("name: x", "name: y\nafter: x"))
    spec.write_text(spec.read_text() + "sweep: {params.a: [1, 2]}\n")
    return Submitter(tmp_path, slurm, spec)


def points(effects: list[str]) -> list[int]:
    """Where to kill: everywhere, or in the middle, after the first launch, and before the last run gets its name."""
    if os.environ.get("TEST_KILLS") == "all":
        return list(range(1, len(effects) + 1))
    launches = [i for i, effect in enumerate(effects, 1) if "Popen" in effect and "python" in effect]
    renames = [i for i, effect in enumerate(effects, 1) if "os.rename" in effect and "/.new-" in effect]
    return sorted({len(effects) // 2, launches[0] + 1, renames[-1]})


def test_a_killed_submit_with_a_key_is_completed_by_the_same_command(submitter: Submitter) -> None:
    for key in ("makes the registry", "undisturbed"):
        assert submitter.submit(key).code == 0
    submitter.let_launchers_end()
    effects = submitter.effects()
    expected = 6
    for point in points(effects):
        assert submitter.submit(f"k{point}", kill_at=point).code == -9, (point, effects[point - 1])
        submitter.let_launchers_end()
        again = submitter.submit(f"k{point}")
        assert again.code == 0, (point, effects[point - 1], again.errors)
        ids = [run["id"] for run in json.loads(again.output)["runs"]]
        submitter.let_launchers_end()
        expected += 3
        jobs = submitter.submitted()
        present = sorted(path.name for path in submitter.runs.iterdir() if RUN_ID.fullmatch(path.name))
        assert jobs == present, (point, effects[point - 1])
        assert len(jobs) == expected
        assert set(ids) <= set(present)
        assert len(ids) == 3
        last, *before = ids
        upstreams = read_upstreams(RunsRoot(submitter.runs).run(last))
        assert [upstream.run for upstream in upstreams] == before, (point, effects[point - 1])
