"""What the next ranks continue from: slurmtrain's checkpoints, and those that a script saves by itself."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import make_run

from slurmtrain.model.interruption.policy import Newest
from slurmtrain.model.run.events.agent_events import NodeEnded, WorkersStarted
from slurmtrain.model.run.events.base import Payload
from slurmtrain.model.run.events.checkpoint_events import CheckpointFound, CheckpointVerified
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.agent.node_start import CheckpointFinder
from slurmtrain.runtime.checkpoint.external import Search, newest
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.journal import Journal


def save(path: Path, step: int) -> Path:
    """An archive such as torch.save writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"step": step}))
    return path


class Agents:
    """The agents of node 0 in the attempts of a run whose script saves into ``out``."""

    def __init__(self, path: Path, **checkpoint: Any) -> None:
        self.run: RunDir = make_run(path, **{"glob": "out/*.pt", **checkpoint})
        self.out = path / "out"

    def choose(self, attempt: str = "1.1", *, since: float | None = None) -> tuple[str | None, Newest]:
        """What the ranks of this attempt continue from."""
        directory = AttemptDir(self.run.attempts / attempt)
        directory.path.mkdir(parents=True, exist_ok=True)
        plan = read_plan(self.run.plan)
        assert plan is not None
        with Journal(directory.node_journal(0)) as journal:
            resume_from, chosen = CheckpointFinder(directory, plan, journal, since).choose()
        return (Path(resume_from).name if resume_from else None), chosen

    def journal(self, *payloads: Payload, attempt: str = "1.0") -> None:
        """What the agent of an earlier attempt has journaled."""
        with Journal(AttemptDir(self.run.attempts / attempt).node_journal(0)) as journal:
            for payload in payloads:
                journal.write(payload)

    def crashed_from(
        self, path: Path, *, cause: str = "crash", left: Path | None = None, why: str = "KeyError"
    ) -> None:
        """The attempt before was started from this checkpoint, and ended."""
        failure = {"rank": 0, "exit_code": 1, "error": "KeyError"}
        self.journal(
            self.describe(path), WorkersStarted(), self.describe(path),
            NodeEnded(cause=cause, failures=[failure] if cause == "crash" else []),
        )  # fmt: skip

    def describe(self, path: Path) -> CheckpointFound:
        checkpoint = newest(Search(pattern=str(path)))
        assert checkpoint is not None
        return CheckpointFound(
            path=str(path), step=checkpoint.step, bytes=checkpoint.bytes, saved_at=checkpoint.saved_at,
            format=checkpoint.format, fingerprint=checkpoint.fingerprint(),
        )  # fmt: skip

    def events(self, kind: str, attempt: str = "1.1") -> list[dict[str, Any]]:
        journal = AttemptDir(self.run.attempts / attempt).node_journal(0)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path)


def test_the_newest_complete_one_is_handed_over_and_journaled(agents: Agents) -> None:
    save(agents.out / "a.pt", 10)
    torn = save(agents.out / "b.pt", 20)
    torn.write_bytes(torn.read_bytes()[:-10])
    name, chosen = agents.choose()
    assert (name, chosen.step) == ("a.pt", 10)
    [event] = agents.events("found")
    assert (event["format"], event["fingerprint"]) == ("torch", chosen.fingerprint)


def test_what_ranks_crashed_from_is_passed_over_until_a_newer_one_is_there(agents: Agents) -> None:
    save(agents.out / "a.pt", 10)
    agents.crashed_from(save(agents.out / "b.pt", 20))
    assert agents.choose()[0] == "a.pt"
    [event] = agents.events("passed_over")
    assert (event["path"], event["step"]) == (str(agents.out / "b.pt"), 20)
    assert event["why"] == "its ranks crashed (# KeyError) before they had made another"
    save(agents.out / "c.pt", 30)
    assert agents.choose("1.2")[0] == "c.pt"


def test_the_only_one_is_tried_again_and_nothing_is_said_to_be_passed_over(agents: Agents) -> None:
    agents.crashed_from(save(agents.out / "a.pt", 10))
    assert agents.choose()[0] == "a.pt"
    assert agents.events("passed_over") == []


@pytest.mark.parametrize("cause", ["preempted", "node_fail", "timeout", "hang"])
def test_after_an_interruption_nothing_is_passed_over(agents: Agents, cause: str) -> None:
    save(agents.out / "a.pt", 10)
    agents.crashed_from(save(agents.out / "b.pt", 20), cause=cause)
    assert agents.choose()[0] == "b.pt"


def test_what_verify_found_damaged_is_passed_over(agents: Agents) -> None:
    save(agents.out / "a.pt", 10)
    path = save(agents.out / "b.pt", 20)
    agents.journal(agents.describe(path), NodeEnded(cause="preempted"))
    with Journal(agents.run.journals / "verify.jsonl") as journal:
        journal.write(CheckpointVerified(path=str(path), step=20, reason="its checksum differs"))
    assert agents.choose()[0] == "a.pt"
    assert [event["why"] for event in agents.events("passed_over")] == ["'slurmtrain verify' found it damaged"]


def test_a_script_that_looks_itself_is_handed_none_but_its_progress_is_known(tmp_path: Path) -> None:
    agents = Agents(tmp_path, format="own")
    save(agents.out / "a.pt", 10)
    agents.crashed_from(save(agents.out / "b.pt", 20))
    name, chosen = agents.choose()
    assert (name, chosen.step) == (None, 20)
    assert (len(agents.events("found")), agents.events("passed_over")) == (1, [])


def test_what_is_older_than_a_fresh_start_is_not_handed_over(agents: Agents) -> None:
    path = save(agents.out / "a.pt", 10)
    assert agents.choose(since=path.stat().st_mtime + 1) == (None, Newest())
