"""The server of live pages: who may read them, what they are told, and how little that costs."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from helpers.fakeslurm import SlurmCommands, squeue_line
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.simulated_run import SimulatedRun
from helpers.site import until
from helpers.workspaces import make_workspace

from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.why import shown_json
from slurmtrain.plugins.serve.live_pages import LivePages
from slurmtrain.plugins.serve.page_server import PageServer

INTERVAL_S = 0.05
ENDED, TRAINING, WAITING = "0000000021", "0000000022", "0000000023"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says, decompressed."""

    status: int
    headers: Message
    body: bytes


class Client:
    """A browser without a screen."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._headers: dict[str, str] = {}
        self.first = self.ask(f"/?token={token}")
        self._headers = {"Cookie": self.first.headers["Set-Cookie"].partition(";")[0]}

    def ask(self, address: str, method: str = "GET", **headers: str) -> Answer:
        """The answer."""
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request(method, address, headers={**self._headers, **headers})
            answer = connection.getresponse()
            body = answer.read()
            is_compressed = answer.headers["Content-Encoding"] == "gzip"
            return Answer(answer.status, answer.headers, gzip.decompress(body) if is_compressed else body)

    def json(self, address: str) -> Any:
        """What is at an address."""
        answer = self.ask(address)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    @contextmanager
    def events(self, address: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The data of events as they come."""
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", address, headers=self._headers)
            answer = connection.getresponse()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


@contextmanager
def serving(workspace: Workspace) -> Iterator[tuple[Client, LivePages]]:
    pages = LivePages(workspace.config, INTERVAL_S)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        PageServer(pages, listener) as server,
    ):
        yield Client(listener.getsockname()[1], server.token), pages


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    slurm = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", slurm.on_path())
    slurm.replies("squeue", squeue_line("3", run_id=WAITING))
    slurm.replies("sacct")
    return slurm


@pytest.fixture
def root(tmp_path: Path, slurm: SlurmCommands) -> Workspace:
    """A runs root with a run that has ended, one that trains, and one that waits for Slurm."""
    workspace = make_workspace(tmp_path / "runs")
    write_run(workspace, 21, "ended", metrics={"loss": 0.5})
    write_run(workspace, 22, "training", state="running", metrics={"loss": 0.5})
    directory = workspace.root.run(WAITING)
    SimulatedRun(directory, spec={"name": "waiting"}, job="3", now=time.time() - 60).submitted()
    return workspace


def reach(workspace: Workspace, step: int) -> None:
    """The run that trains goes on."""
    sim = SimulatedRun(workspace.root.run(TRAINING), executor="local", job="local-22", now=time.time())
    sim.reached(step, loss=1 / step)


def test_whoever_lacks_the_token_or_names_another_server_learns_nothing(root: Workspace) -> None:
    with serving(root) as (client, _):
        cookie = client._headers.pop("Cookie")
        name = cookie.partition("=")[0]
        refused = [
            client.ask("/"),
            client.ask(f"/run/{ENDED}"),
            client.ask("/facts/many"),
            client.ask("/events/many"),
            client.ask("/no/such/page"),
            client.ask("/", "POST"),
            client.ask("/?token="),
            client.ask("/?token=wrong"),
            client.ask("/?token=%ff%00"),
            client.ask("/", Cookie=f"{name}=wrong"),
            client.ask("/", Cookie=cookie.replace(name, "slurmtrain-00000000")),
            client.ask("/", Cookie=cookie, Host="evil.example"),
            client.ask("/", Cookie=cookie, Host="127.0.0.1.evil.example:8321"),
            client.ask("/", Cookie=cookie, Host="[::1"),
            client.ask("/facts/many", Cookie=cookie, **{"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}),
            client.ask("/facts/many", Cookie=cookie, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
        ]
        names = ("localhost:9999", "127.0.0.1", "[::1]:1")
        accepted = [client.ask("/", Cookie=cookie, Host=host).status for host in names]
    assert {(answer.status, answer.body) for answer in refused} == {
        (403, b"403 Forbidden: open the address that this server has printed; each server has a new token.\n")
    }
    assert not any("set-cookie" in answer.headers or "server" in answer.headers for answer in refused)
    assert accepted == [200, 200, 200]


def test_the_token_becomes_a_cookie_and_leaves_the_address(root: Workspace) -> None:
    with serving(root) as (client, _):
        token = client._headers["Cookie"].partition("=")[2]
        deeper = client.ask(f"/run/{ENDED}?a=b%26c&token={token}")
        elsewhere = client.ask(f"//evil.example/%0d%0a?token={token}")
        linked = client.ask(f"/?token={token}", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
        page = client.ask("/")
    cookie = client.first.headers["Set-Cookie"]
    assert (client.first.status, client.first.headers["Location"]) == (303, "/")
    assert cookie.endswith("; HttpOnly; Path=/; SameSite=strict")
    assert deeper.headers["Location"] == f"/run/{ENDED}?a=b%26c"
    assert elsewhere.headers["Location"] == "/evil.example/%0D%0A"
    # A browser withholds the cookie after a redirect that began on another site.
    assert (linked.status, linked.headers["Refresh"], linked.headers["Location"]) == (200, "0; url=/", None)
    for answer in (client.first, linked, page):
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert token not in str(answer.headers["Location"])
    assert client.first.headers["Cache-Control"] == "no-store"
    assert b"script-src &#39;sha256-" in page.body


def test_pages_have_the_figures_of_show_and_are_sent_once(root: Workspace) -> None:
    write_sweep(Workspace(root.config))
    with serving(root) as (client, _):
        page = client.ask(f"/run/{ENDED}", **{"Accept-Encoding": "gzip"})
        facts = client.ask(f"/facts/run/{ENDED}")
        again = client.ask(f"/facts/run/{ENDED}", **{"If-None-Match": facts.headers["ETag"]})
        page_again = client.ask(f"/run/{ENDED}", **{"If-None-Match": page.headers["ETag"]})
        redirected = [client.ask(address).headers["Location"] for address in ("/run/training", f"/run/{SWEEP}")]
        sweep, many = client.json(f"/facts/sweep/{SWEEP}"), client.json("/facts/many")
        missing = [client.ask(address) for address in ("/run/nobody", "/facts/run/0000000099", "/facts/sweep/nothing")]
        odd = [client.ask(address).status for address in ("/facts/odd/1", "/facts/run", "/events/odd", "/x")]
    observed = observe(Workspace(root.config), [ENDED], thorough=True)
    run, shown = json.loads(facts.body)["run"], shown_json(Workspace(root.config), observed.runs, ENDED)
    assert run.keys() >= {"id", "state", "step", "metrics", "attempts", "seconds"}
    attempts, of_show = run.pop("attempts"), shown.pop("attempts")
    assert run.items() <= shown.items()
    assert all(each.items() <= whole.items() for each, whole in zip(attempts, of_show, strict=True))
    assert f'data-source="/facts/run/{ENDED}"'.encode() in page.body
    assert page.headers["Content-Encoding"] == "gzip"
    assert [(each.status, each.body) for each in (again, page_again)] == [(304, b"")] * 2
    assert redirected == [f"/run/{TRAINING}", f"/sweep/{SWEEP}"]
    assert len(sweep["runs"]) == 6
    assert len(many["runs"]) == 9
    assert [each.status for each in missing] == [404, 404, 404]
    assert missing[0].body.startswith(b"there is no run 'nobody'")
    assert "0000000099" in json.loads(missing[1].body)["problem"]
    assert odd == [404, 404, 404, 404]


def test_pages_are_told_what_changes_and_nothing_else(root: Workspace) -> None:
    with serving(root) as (client, pages):
        with client.events("/events/many") as of_all, client.events(f"/events/run/{ENDED}") as of_ended:
            first, ended = next(of_all), next(of_ended)
            looks = pages.looks
            until(lambda: pages.looks > looks + 3, "further looks")
            reach(root, 200)
            second = next(of_all)
            facts = client.json("/facts/many")
            shutil.rmtree(root.root.run(ENDED).path)
            third, deleted = next(of_all), next(of_ended)
            gone = client.ask(f"/facts/run/{ENDED}")
        looks = pages.looks
        until(lambda: pages._followers == 0, "the end of the connections")
    assert len({first["revision"], second["revision"], third["revision"]}) == 3
    assert first["problems"] == []
    assert facts["revision"] == second["revision"]
    assert {run["id"]: run.get("step") for run in facts["runs"]}[TRAINING] == 200
    # Nothing came for the run that stayed as it was.
    assert deleted["revision"] != ended["revision"]
    assert gone.status == 404


def test_whatever_a_sweep_is_called_it_has_a_page(root: Workspace) -> None:
    name = "<b>100 % of it#&\"'é"
    for number in (31, 32):
        write_run(root, number, sweep=name)
    with serving(root) as (client, _):
        page = client.ask(f"/run/{quote(name, safe='')}")
        target = client.ask(page.headers["Location"])
        facts = client.json(f"/facts/sweep/{quote(name, safe='')}")
        with client.events(f"/events/sweep/{quote(name, safe='')}") as events:
            assert next(events)["revision"] == facts["revision"]
    assert (page.status, target.status) == (303, 200)
    assert name.encode() not in target.body
    assert len(facts["runs"]) == 2


def test_a_page_follows_the_runs_that_its_run_comes_from_or_waits_for(root: Workspace) -> None:
    with serving(root) as (client, _), client.events(f"/events/run/{TRAINING}") as events:
        alone = next(events)
        child = SimulatedRun(root.root.run("0000000024"), spec={"name": "child"}, executor="local", now=time.time())
        child.created(parents=[{"run": TRAINING, "relation": "rerun", "step": None}])
        with_child = next(events)
        assert [each["run"] for each in client.json(f"/facts/run/{TRAINING}")["run"]["children"]] == ["0000000024"]
        with client.events("/events/run/0000000024") as of_child:
            before = next(of_child)
            reach(root, 200)
            assert next(of_child)["revision"] != before["revision"]
    assert with_child["revision"] != alone["revision"]


def test_ten_browsers_cost_as_much_as_one_and_none_costs_nothing(root: Workspace, slurm: SlurmCommands) -> None:
    with serving(root) as (client, pages):
        until(lambda: pages.looks == 1, "the first look")
        time.sleep(5 * INTERVAL_S)
        assert pages.looks == 1, "nobody follows a page"
        streams = [client.events("/events/many") for _ in range(10)]
        opened = [stream.__enter__() for stream in streams]
        revisions = {next(events)["revision"] for events in opened}
        assert {client.json("/facts/many")["revision"] for _ in opened} == revisions
        assert pages.builds == 1
        reach(root, 200)
        revisions = {next(events)["revision"] for events in opened}
        assert {client.json("/facts/many")["revision"] for _ in opened} == revisions
        assert pages.builds == 2
        looks = pages.looks
        until(lambda: pages.looks > looks + 10, "further looks")
        for stream in streams:
            stream.__exit__(None, None, None)
    # Many looks, ten browsers and facts of all kinds are within slurm_interval.
    assert len(slurm.calls("squeue")) == 1
    assert len(slurm.calls("sacct")) <= 1
    assert not any(slurm.calls(name) for name in ("sbatch", "scancel", "scontrol"))


def test_a_slurm_that_does_not_answer_and_runs_that_cannot_be_read_are_problems_to_show(
    root: Workspace, slurm: SlurmCommands
) -> None:
    slurm.fails("squeue", "squeue: error: Unable to contact slurm controller")
    with serving(root) as (client, _), client.events("/events/many") as events:
        problems = next(events)["problems"]
        before = client.json("/facts/many")
        runs = root.config.runs
        runs.rename(runs.with_name("moved"))
        runs.write_text("not a directory")
        unreadable = next(events)
        after, new = client.json("/facts/many"), client.ask(f"/facts/run/{ENDED}")
    assert any("Unable to contact slurm controller" in problem for problem in problems)
    assert str(runs) in unreadable["problems"][0]
    assert after == before
    assert (new.status, str(runs) in json.loads(new.body)["problem"]) == (404, True)


def test_an_empty_root_is_a_page_that_says_so_and_is_left_empty(tmp_path: Path, slurm: SlurmCommands) -> None:
    workspace = make_workspace(tmp_path / "runs")
    with serving(workspace) as (client, _), client.events("/events/many") as events:
        first = next(events)
        page, facts = client.ask("/"), client.ask("/facts/many")
        assert not os.path.lexists(workspace.config.runs)
        write_run(workspace, 1)
        assert next(events)["revision"] != first["revision"]
        assert len(client.json("/facts/many")["runs"]) == 1
    assert page.status == 200
    assert "there are no runs in" in json.loads(facts.body)["problem"]


def test_the_server_ends_at_once_while_pages_are_open(root: Workspace) -> None:
    with serving(root) as (client, _):
        stream = client.events("/events/many")
        events = stream.__enter__()
        next(events)
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert list(events) == []


def test_the_server_does_not_wait_for_a_slurm_that_hangs(
    root: Workspace, slurm: SlurmCommands, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers"
    slurm.replies("squeue", until=answers)
    with serving(root) as (client, pages):
        until(lambda: slurm.calls("squeue"), "the question")
        assert client.ask("/").status == 200
        began = time.monotonic()
    duration = time.monotonic() - began
    answers.touch()
    pages._reader.join(60)
    assert duration < 3
    assert capfd.readouterr().err == ""
