"""Metrics on a real MLflow server: from a run's own node, from ``sync``, and from both, whatever the server does."""

from __future__ import annotations

import base64
import contextlib
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.mlflow_server import mlflow_server
from helpers.simulated_run import RUN_ID, SimulatedRun, make_test_plan
from helpers.site import Site, until
from helpers.tracking_proxy import TrackingProxy, tracking_proxy
from helpers.workspaces import make_workspace

from slurmtrain.errors import TrackingError
from slurmtrain.ops.shared.mirroring import MirrorOutcome, mirror_runs
from slurmtrain.ops.shared.next_attempts import run_settings
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.agent.script_metrics import LiveOrders
from slurmtrain.system.files import write_json
from slurmtrain.tracking.to_mlflow.live_sender import LiveSender
from slurmtrain.tracking.to_mlflow.mlflow_runs import Choices, MlflowRuns
from slurmtrain.tracking.to_mlflow.rest_client import RestClient, RestError
from slurmtrain.tracking.to_mlflow.sending import flat_name

STEPS = 160


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture(scope="module")
def server(database: Path) -> Iterator[str]:
    with mlflow_server(database.parent, f"sqlite:///{database}") as uri:
        yield uri


@pytest.fixture
def proxy(server: str) -> Iterator[TrackingProxy]:
    with tracking_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "runs")


class Shown:
    """What the server has of one MLflow run."""

    def __init__(self, database: Path, mlflow_id: str | None) -> None:
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", [mlflow_id])
            self.points = sorted(rows.fetchall())
            rows = connection.execute("SELECT lifecycle_stage FROM runs WHERE run_uuid = ?", [mlflow_id])
            self.stage = rows.fetchone()[0] if mlflow_id else None

    def line(self, name: str = "loss") -> list[tuple[int, float]]:
        return [(step, value) for key, step, value in self.points if key == name]

    @property
    def names(self) -> set[str]:
        return {key for key, _, _ in self.points}


def trained(workspace: Workspace, uri: str, run_id: str = RUN_ID, **tracking: Any) -> SimulatedRun:
    """A run that has trained 5 steps, was killed, and has gone on from step 3 to 6, with a checkpoint after 5."""
    directory = workspace.root.run(run_id)
    # Runs of all tests have the same id.
    mlflow = {"uri": uri, "experiment": str(directory.path)}
    run = SimulatedRun(directory, spec={"tracking": {"mlflow": mlflow, **tracking}}, now=99.0)
    assert run._plan is not None
    run.created(**run_settings(run._plan)).submitted().started()
    for step in range(1, 6):
        run.later(1).reached(step, loss=step / 10, bad=1.0)
        if step == 3:
            run.saved(3)
    run.ended("preempted").started(1).node("workers", 0, 1, first_step=3)
    for step in range(4, 7):
        run.later(1).reached(step, 1, loss=step / 100, bad=1.0)
        if step == 5:
            run.saved(5, 1)
    return run


SURVIVING = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.04), (5, 0.05), (6, 0.06)]
REPLAYED = [(4, 0.4), (5, 0.5)]


def mirror(workspace: Workspace, ids: Sequence[str] = (RUN_ID,)) -> MirrorOutcome:
    return mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch(ids))


def mlflow_id(workspace: Workspace) -> str | None:
    run = workspace.store.load(RUN_ID)
    return run.mlflow_run_id if run else None


def live(workspace: Workspace, uri: str, *, undecided: bool = False) -> LiveSender:
    directory = workspace.root.run(RUN_ID)
    return LiveSender(LiveOrders(uri, str(directory.path), str(directory.plan), undecided), {}, lambda _: None)


def linked(workspace: Workspace, proxy: TrackingProxy) -> str:
    """Create the MLflow run of the run, with no metrics in it, as its node does."""
    return live(workspace, proxy.uri).begin()


def test_a_run_sends_its_metrics_itself_and_a_later_sync_adds_nothing_with_a_password_that_is_written_nowhere(
    tmp_path: Path, proxy: TrackingProxy, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    password = secrets.token_hex()
    proxy.authorization = f"Basic {base64.b64encode(f'ada:{password}'.encode()).decode()}"
    # The proxy of the network knows no address of this machine.
    variables = {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": password}
    variables |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    environment = site.environment
    monkeypatch.setattr(site, "environment", lambda: environment() | variables)
    spec = site.light(
        params={"steps": STEPS, "step_ms": 100},
        checkpoint={"every": {"steps": 10}},
        tracking={"mlflow": {"uri": proxy.uri}},
    )
    run_id = site.submit(spec)
    until(lambda: site.status(run_id)["mlflow_run_id"], "the run on the server")
    remote = site.status(run_id)["mlflow_run_id"]
    until(lambda: Shown(database, remote).points, "the first metrics on the server")
    assert site.step(run_id) < STEPS
    assert not [command for command in command_lines() if password in command]
    site.until_state(run_id, "completed")
    until(lambda: not site.processes(run_id), "the end of all processes")
    shown = Shown(database, remote)
    assert [step for step, _ in shown.line()] == list(range(1, STEPS + 1))
    assert shown.names == {"loss"}
    batches = proxy.requests["runs/log-batch"]
    site.call("sync")
    assert proxy.requests["runs/log-batch"] > batches
    assert Shown(database, remote).line() == shown.line()
    assert site.status(run_id)["mlflow_run_id"] == remote
    written = [path for path in tmp_path.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
    assert written == []


def command_lines() -> list[str]:
    """The command lines of all processes of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().decode(errors="replace"))
    return lines


def test_two_senders_give_a_server_each_point_once(workspace: Workspace, proxy: TrackingProxy, database: Path) -> None:
    run = trained(workspace, proxy.uri)
    remote = linked(workspace, proxy)
    live(workspace, proxy.uri).send()
    assert mirror(workspace).problems == []
    run.ended("completed", 0, 1)
    assert mirror(workspace).problems == []
    live(workspace, proxy.uri).send()
    shown = Shown(database, remote)
    assert shown.line() == SURVIVING
    assert shown.line("replayed/loss") == REPLAYED
    sent = Counter(proxy.metrics)
    assert sent["loss", 1, 0.1] == 2


def test_points_that_may_be_rolled_back_have_a_name_of_their_own(
    workspace: Workspace, proxy: TrackingProxy, database: Path
) -> None:
    trained(workspace, proxy.uri)
    remote = linked(workspace, proxy)
    sender = live(workspace, proxy.uri, undecided=True)
    sender.send()
    requests = proxy.requests["runs/log-batch"]
    sender.send()
    assert proxy.requests["runs/log-batch"] == requests
    shown = Shown(database, remote)
    assert shown.line() == SURVIVING[:4]
    assert shown.line("live/loss") == SURVIVING[4:]


@pytest.mark.parametrize("sender", ["sync", "node"])
def test_whatever_the_server_does_nothing_is_lost_or_doubled(
    sender: str, workspace: Workspace, proxy: TrackingProxy, database: Path
) -> None:
    trained(workspace, proxy.uri).ended("completed", 0, 1)
    remote = linked(workspace, proxy)

    def fails() -> bool:
        if sender == "sync":
            return bool(mirror(Workspace(workspace.config)).problems)
        try:
            live(workspace, proxy.uri).send()
        except (RestError, TrackingError):
            return True
        return False

    proxy.refuse_connections()
    assert fails()
    proxy.listen()
    proxy.status = 500
    assert fails()
    proxy.status = 0
    # The server takes a batch, and dies before it has said so.
    proxy.lose_answers_after = 0
    assert fails()
    assert Shown(database, remote).points
    proxy.lose_answers_after = None
    proxy.refused_names = frozenset({"bad"})
    assert not fails()
    shown = Shown(database, remote)
    assert shown.line() == SURVIVING
    assert shown.line("replayed/loss") == REPLAYED
    assert shown.line("replayed/bad") == [(4, 1.0), (5, 1.0)]


def log_nothing(client: Any, mlflow_id: str, folder: Path) -> None:
    pass


def log_param(client: Any, mlflow_id: str, folder: Path) -> None:
    client.log_param(mlflow_id, "found by the script", 1)


def log_artifact(client: Any, mlflow_id: str, folder: Path) -> None:
    (folder / "picture.txt").write_text("drawn by the script")
    client.log_artifact(mlflow_id, str(folder / "picture.txt"))


@pytest.mark.parametrize(("log", "stage"), [(log_nothing, "deleted"), (log_param, "active"), (log_artifact, "active")])
def test_a_run_that_is_rolled_back_behind_what_its_node_has_sent_begins_anew(
    log: Callable[[Any, str, Path], None], stage: str, workspace: Workspace, proxy: TrackingProxy, database: Path
) -> None:
    import mlflow

    run = trained(workspace, proxy.uri)
    first = linked(workspace, proxy)
    live(workspace, proxy.uri).send()
    assert Shown(database, first).line() == SURVIVING[:4]
    client = mlflow.MlflowClient(tracking_uri=proxy.uri)
    log(client, first, database.parent)
    # The checkpoint of step 5 turns out to be damaged.
    run.ended("preempted", 0, 1).started(2).node("workers", 0, 2, first_step=3)
    run.later(1).reached(4, 2, loss=4.4).ended("completed", 0, 2)
    before = len(proxy.metrics)
    with pytest.raises(TrackingError, match="'slurmtrain sync' starts a new MLflow run"):
        live(workspace, proxy.uri).send()
    assert len(proxy.metrics) == before
    assert mirror(workspace).problems == []
    second = mlflow_id(workspace)
    assert second != first
    assert Shown(database, first).stage == stage
    assert client.get_run(first).data.tags["slurmtrain.replaced_by"] == second
    live(workspace, proxy.uri).send()
    assert Shown(database, second).line() == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.4)]


# --- who creates the MLflow run --------------------------------------------------------------------------------------


def shown_of(workspace: Workspace, uri: str, *, deleted: bool = False) -> list[Any]:
    """The MLflow runs of the experiment of this workspace's runs; the deleted ones, or those that were not."""
    import mlflow
    from mlflow.entities import ViewType

    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(str(workspace.root.run(RUN_ID).path))
    assert experiment is not None
    view = ViewType.DELETED_ONLY if deleted else ViewType.ACTIVE_ONLY
    return list(client.search_runs([experiment.experiment_id], run_view_type=view))


def test_of_many_processes_that_create_the_run_at_once_all_take_the_same(
    workspace: Workspace, proxy: TrackingProxy
) -> None:
    trained(workspace, proxy.uri)
    proxy.delay_s = 0.05
    with ThreadPoolExecutor(4) as pool:
        begins = [pool.submit(linked, workspace, proxy) for _ in range(4)]
        mirrored = mirror(Workspace(workspace.config))
    assert mirrored.problems == []
    [shown] = shown_of(workspace, proxy.uri)
    assert {begin.result() for begin in begins} == {shown.info.run_id}
    others = shown_of(workspace, proxy.uri, deleted=True)
    assert {other.data.tags["slurmtrain.replaced_by"] for other in others} <= {shown.info.run_id}
    mirror(workspace)
    assert mlflow_id(workspace) == shown.info.run_id


class Killed(BaseException):
    """Stands for a SIGKILL."""


def test_a_process_that_is_killed_around_the_choice_of_its_run_leaves_no_second_one(
    workspace: Workspace, proxy: TrackingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(workspace, proxy.uri)

    def killed(*_: object) -> str:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Choices, "choose", killed)
        linked(workspace, proxy)
    [created] = shown_of(workspace, proxy.uri)
    assert linked(workspace, proxy) == created.info.run_id
    # Another process has created one meanwhile, and is killed as soon as it knows that it was too late.
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MlflowRuns, "_newest_choice", lambda *_: ("", None))
        patch.setattr(MlflowRuns, "_present", lambda *_: iter(()))
        patch.setattr(RestClient, "set_tag", killed)
        linked(workspace, proxy)
    assert len(shown_of(workspace, proxy.uri)) == 2
    run.ended("completed", 0, 1)
    assert mirror(workspace).problems == []
    assert [shown.info.run_id for shown in shown_of(workspace, proxy.uri)] == [created.info.run_id]


def test_a_run_that_was_resumed_with_other_params_has_a_new_mlflow_run_before_its_ranks_start(
    workspace: Workspace, proxy: TrackingProxy, database: Path
) -> None:
    run = trained(workspace, proxy.uri)
    for number, lr in enumerate((0.1, 0.5)):
        plan = make_test_plan(tracking=run._plan.content["tracking"], params={"lr": lr})  # type: ignore[union-attr]
        write_json(workspace.root.run(RUN_ID).plan, plan.to_json())
        if number == 0:
            first = linked(workspace, proxy)
            live(workspace, proxy.uri).send()
    run.ended("preempted", 0, 1)
    second = linked(workspace, proxy)
    assert (Shown(database, first).stage, second != first) == ("deleted", True)
    live(workspace, proxy.uri).send()
    assert Shown(database, second).line() == SURVIVING
    assert shown_of(workspace, proxy.uri)[0].data.params == {"lr": "0.5"}


# --- stores that refuse, and servers that do not answer --------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["replayed/", "live/"])
@pytest.mark.parametrize("sender", ["sync", "node"])
def test_a_store_that_refuses_a_name_with_a_prefix_only_gets_the_surviving_line_and_that_is_reported_once(
    sender: str, prefix: str, workspace: Workspace, proxy: TrackingProxy, database: Path
) -> None:
    run = trained(workspace, proxy.uri, live=True)
    proxy.refused_names = frozenset({f"{prefix}bad", flat_name(f"{prefix}bad")})
    remote = linked(workspace, proxy)
    if sender == "node":
        live(workspace, proxy.uri, undecided=True).send()
    notes = mirror(workspace).notes
    assert [f"metric '{prefix}bad'" in note for note in notes] == [True]
    batches = proxy.requests["runs/log-batch"]
    run.later(1).reached(7, 1, loss=0.07, bad=1.0)
    assert mirror(Workspace(workspace.config)).notes == []
    # It is not tried again: params, tags and the time in the queue are batches too.
    assert proxy.requests["runs/log-batch"] - batches <= 3
    run.ended("completed", 0, 1)
    assert mirror(Workspace(workspace.config)).notes == []
    shown = Shown(database, remote)
    assert [step for step, _ in shown.line("bad")] == list(range(1, 8))
    assert shown.line("replayed/loss") == REPLAYED
    assert (f"{prefix}bad" in shown.names, "live/loss" in shown.names) == (False, True)


class Deaf(ThreadingHTTPServer):
    """Accepts connections, and closes them without an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BaseHTTPRequestHandler)
        self.connections = 0

    def finish_request(self, *_: object) -> None:
        self.connections += 1


def test_a_server_that_does_not_answer_is_asked_for_one_run_of_many_and_all_are_sent_later(
    workspace: Workspace, proxy: TrackingProxy
) -> None:
    ids = [f"{RUN_ID[:-1]}{number}" for number in range(4)]
    with Deaf() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        for run_id in ids:
            trained(workspace, f"http://127.0.0.1:{server.server_port}", run_id)
        outcome = mirror(workspace, ids)
        server.shutdown()
    assert (len(outcome.problems), outcome.mirrored) == (1, [])
    assert "does not answer" in outcome.problems[0]
    # MLflow's client tries it twice.
    assert server.connections == 2
    assert [workspace.store.sent()[run_id]["mlflow"].problem for run_id in ids] == outcome.problems * 4
    with tracking_proxy(proxy.upstream) as back:
        back.refuse_connections()
        back.port = server.server_port
        back.listen()
        outcome = mirror(Workspace(workspace.config), ids)
    assert (outcome.problems, sorted(outcome.mirrored)) == ([], ids)
