"""The process that shows a run on an MLflow server while it trains, on node 0: ``python -m ...live_sender``.

The agent starts it (:mod:`slurmtrain.runtime.agent.script_metrics`). Its orders are a line of JSON on standard input.
It finds or creates the MLflow run, and prints its id, for which the agent waits for a moment: it is not created when
the run is submitted, since MLflow never changes the time at which a run started. Then it sends metrics, and neither the
agent nor a rank waits for that. When its standard input ends, it sends what the end of the attempt has settled, and
ends too.

``sync`` sends the same, from another machine. A point that both send is one point, since both give it the time at which
it was logged. What this process has sent, and is about to send, stands in a file of the run directory, since it has no
registry: if the run is rolled back behind a point that the server may have, ``sync`` has to know. This process then
sends nothing more to that MLflow run, until a command has replaced it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slurmtrain.errors import PathError, RunUnreadable, TrackingError
from slurmtrain.model.metrics.settled import Decided, Place, Settlement, covered_until
from slurmtrain.model.run.events.base import AnyEvent
from slurmtrain.model.run.events.base import select as select_events
from slurmtrain.model.run.events.command_events import MlflowRunLinked
from slurmtrain.model.run.layout import JOURNALS, RunDir, RunsRoot
from slurmtrain.runtime.agent.script_metrics import LiveOrders
from slurmtrain.runtime.checkpoint.writer_process import begin_helper
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.runtime.job.run_reader import logged_lines, read_events, read_run
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.journal import command_journal
from slurmtrain.tracking.to_mlflow import rest_client
from slurmtrain.tracking.to_mlflow.mlflow_runs import MlflowRuns
from slurmtrain.tracking.to_mlflow.rest_client import RestError
from slurmtrain.tracking.to_mlflow.sending import Api, MetricLog
from slurmtrain.tracking.tracker import TrackedPoint, TrackedRun

_LINES = 1000
# In seconds: the pause, which doubles with each failure in a row, its limit, and the limit of the last round.
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_LAST_S = 10
# The part of one core that it may take.
_SHARE = 0.02
_NICE = 10
# It takes about 25 MB. It must not take much more from the job, whatever is wrong with it.
_MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class LivePlace:
    """How far the live sender has come, with the MLflow run ``mlflow_run_id`` of the server at ``uri``."""

    uri: str
    mlflow_run_id: str
    place: Place = field(default_factory=Place)


def read_place(run: RunDir) -> LivePlace | None:
    """What a run's live sender has sent; None if there is none, or its file cannot be used."""
    try:
        data = read_json(run.live_metrics)
        if data is None:
            return None
        attempt, offset = data["sending"]
        place = Place(
            {int(number): int(end) for number, end in data["offsets"].items()},
            data["step"],
            float(data["until"]),
            data["reach"],
            (int(attempt), int(offset)),
        )
        return LivePlace(str(data["uri"]), str(data["mlflow_run_id"]), place)
    except (PathError, KeyError, TypeError, ValueError):
        return None


def write_place(run: RunDir, live: LivePlace) -> None:
    """Replace the file of a ``run``, durably. Raises OSError."""
    offsets = {str(number): offset for number, offset in live.place.offsets.items()}
    data = {"uri": live.uri, "mlflow_run_id": live.mlflow_run_id, **asdict(live.place), "offsets": offsets}
    write_json(run.live_metrics, data, private=True)


class LiveSender:
    """Sends the metrics of one run again and again; says once when that fails, and once when it works again."""

    def __init__(self, orders: LiveOrders, environ: Mapping[str, str], begun: Callable[[str], None]) -> None:
        """Nothing has been sent.

        Args:
            orders: What to send, and where.
            environ: Where MLflow's variables are.
            begun: Called with the id of the MLflow run, or nothing if that fails.
        """
        self._begun = begun
        self._has_begun = False
        self._problem = ""
        self._failures = 0
        self._orders = orders
        self._directory = RunDir(Path(orders.directory))
        self._environ = environ
        self._to: LivePlace | None = None
        self._metrics: MetricLog
        # How far open points have been sent, by attempt, in bytes.
        self._open_until: dict[int, int] = {}

    def begin(self) -> str:
        """Find or create the MLflow run that shows the run as its newest attempt begins it; returns its id.

        Raises:
            RestError: The server does not answer, or refuses.
            PathError: The run has no plan, or its directory cannot be used.
            OSError: What shows the run cannot be written.
        """
        run, uri = read_run(self._directory), self._orders.uri
        plan = read_plan(Path(self._orders.plan))
        if plan is None:
            raise PathError(f"there is no plan at {self._orders.plan}")
        runs = MlflowRuns(self._api(uri), RunsRoot(self._directory.path.parent))
        link = _newest_link(self._directory)
        earlier = link.mlflow_run_id if link is not None and link.uri == uri else None
        # What was rolled back is for commands, which know what others have sent.
        shown = runs.open(TrackedRun(run, plan, self._directory), earlier, anew=False)
        if shown != earlier:
            # Killed before this, the next process finds the same MLflow run by the choice that open() has stored.
            with command_journal(self._directory.journals, "mlflow") as journal:
                journal.write(MlflowRunLinked(mlflow_run_id=shown, uri=uri))
        for note in runs.notes:
            _report(note)
        return shown

    def send(self) -> None:
        """Send what is new; what is left after an error is sent the next time.

        Raises:
            RestError: The server does not take it.
            TrackingError: The run cannot be sent from here.
            RunUnreadable: Its files cannot be read.
            OSError: How far it was sent cannot be written.
        """
        # To the MLflow run that the run was linked to last, if that is on a server.
        link = _newest_link(self._directory)
        if link is None or not link.mlflow_run_id or not link.uri.startswith(("http://", "https://")):
            return
        to = LivePlace(link.uri, link.mlflow_run_id)
        if self._to is None or not _is_same_run(self._to, to):
            before = read_place(self._directory)
            self._to = before if before is not None and _is_same_run(before, to) else to
            self._metrics = MetricLog(self._api(link.uri), link.mlflow_run_id)
            self._open_until = {}
        to = self._to
        run = read_run(self._directory)
        open_from = (lambda _attempt, _time: math.inf) if run.ended else covered_until(run.checkpoints)
        settlement = Settlement(logged_lines(run, self._directory).attempts, to.place, open_from)
        if settlement.cut is not None:
            raise TrackingError(
                "the run was rolled back to before points that MLflow already has: 'slurmtrain sync' starts a new "
                "MLflow run"
            )
        for batch in settlement.batches(_LINES):
            # Before the request: if this process is killed meanwhile, sync has to know what the server may have.
            self._note(to.place.before(batch))
            self._log(batch)
            to = self._note(to.place.after(batch))
        if self._orders.live:
            # The points that may still be rolled back.
            lines = [line for line in settlement.undecided() if line.offset >= self._open_until.get(line.attempt, 0)]
            self._log(lines)
            self._open_until.update({line.attempt: line.end for line in lines})
        try:
            # All was sent that can be now.
            os.utime(self._directory.live_metrics)
        except FileNotFoundError:
            write_place(self._directory, to)

    def round(self) -> float:
        """Begin unless that is done, and send what is new; returns for how many seconds to pause then."""
        began = time.process_time()
        try:
            if not self._has_begun:
                self._begun(self.begin())
                self._has_begun = True
            self.send()
            problem = ""
        except (RestError, TrackingError, PathError, RunUnreadable, OSError) as error:
            # The agent waits for an answer, and starts the ranks without an MLflow run.
            if not self._has_begun:
                self._begun("")
            problem = str(error)
        if problem and not self._problem:
            _report(
                f"metrics do not reach MLflow from this node ({problem}); it keeps trying, and so does 'slurmtrain "
                "sync'"
            )
        elif self._problem and not problem:
            _report("metrics reach MLflow again")
        # A server that is down for long is asked rarely.
        self._problem = problem
        self._failures = min(self._failures + 1, 10) if problem else 0
        busy_s = time.process_time() - began
        # A round that took much of the processor is followed by a pause so long that its share is kept.
        return max(min(_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S), busy_s / _SHARE)

    def _api(self, uri: str) -> Api:
        return Api(uri, rest_client.RestClient(uri, self._environ), rest_client, (RestError,))

    def _log(self, lines: Sequence[Decided]) -> None:
        self._metrics.send(
            [
                TrackedPoint(line.attempt, point.step, point.time, point.metrics, fate)
                for line in lines
                for fate, point in line.parts.items()
            ]
        )

    def _note(self, place: Place) -> LivePlace:
        assert self._to is not None
        self._to = replace(self._to, place=place)
        write_place(self._directory, self._to)
        return self._to


def _is_same_run(place: LivePlace, other: LivePlace) -> bool:
    return (place.uri, place.mlflow_run_id) == (other.uri, other.mlflow_run_id)


def _newest_link(directory: RunDir) -> MlflowRunLinked | None:
    """The newest link of a run to one in MLflow; None if there is none."""
    events: list[AnyEvent] = []
    for journal in directory.journals.glob("*.jsonl"):
        events += read_events(journal, f"{JOURNALS}/{journal.name}")
    links = select_events(sorted(events, key=lambda event: event.order), MlflowRunLinked)
    return links[-1].payload if links else None


def _report(text: str) -> None:
    print(f"slurmtrain: {text}", file=sys.stderr, flush=True)


def run_sender() -> None:
    """Send until standard input ends, and then what is left."""
    # What ends the job reaches all of its processes, and the last metrics are sent only after that.
    begin_helper()
    os.nice(_NICE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    line = sys.stdin.buffer.readline()
    if not line:
        return

    def begun(mlflow_id: str) -> None:
        # The agent may have ended, or waits no more.
        with contextlib.suppress(BrokenPipeError):
            print(mlflow_id, flush=True)

    sender = LiveSender(LiveOrders(**json.loads(line)), os.environ, begun)
    pause_s = 0.0
    while not select.select([sys.stdin.buffer], [], [], pause_s)[0]:
        pause_s = sender.round()
    # The agent waits for a moment only, or it has been killed: then nobody would end this process.
    signal.alarm(_LAST_S)
    sender.round()


if __name__ == "__main__":
    run_sender()
