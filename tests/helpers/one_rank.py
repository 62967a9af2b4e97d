"""This process as the only rank of a run, for what acts on the process's loop."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.diagnosis.hang import Beat
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.runtime.job.heartbeat import Board
from slurmtrain.runtime.training import loop

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class OneRank:
    """The attempt whose only rank this process is, and what it has reported."""

    def __init__(self, attempt: AttemptDir, board: Board) -> None:
        self.attempt = attempt
        self._board = board

    @property
    def beat(self) -> Beat:
        """The last heartbeat."""
        return self._board.read()[0]

    def events(self) -> list[dict[str, Any]]:
        """The events that the rank has journaled."""
        journal = self.attempt.rank_journal(0)
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    def kinds(self) -> list[str]:
        """The kinds of these events."""
        return [event["kind"] for event in self.events()]

    def lines(self) -> list[tuple[int, dict[str, float]]]:
        """The steps and metrics that were written."""
        if not self.attempt.metrics.exists():
            return []
        records = [json.loads(line) for line in self.attempt.metrics.read_text().splitlines()]
        return [(record["step"], record.get("metrics", {})) for record in records]


@contextmanager
def one_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    """Make this process the only rank of an attempt of a run in ``path``."""
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    attempt = RunDir(path / "0123456789").attempt("job", 0)
    attempt.path.mkdir(parents=True)
    board = Board(1)
    monkeypatch.setenv("SLURMTRAIN_ATTEMPT_DIR", str(attempt.path))
    monkeypatch.setenv("SLURMTRAIN_SUBMISSION", "1")
    monkeypatch.setenv("SLURMTRAIN_HEARTBEAT", board.path)
    loop.current.cache_clear()
    try:
        yield OneRank(attempt, board)
    finally:
        loop.current()._close()
        loop.current.cache_clear()
        board.close()
        for each, handler in handlers.items():
            signal.signal(each, handler)
