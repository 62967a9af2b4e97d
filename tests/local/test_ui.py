"""``slurmtrain ui`` with a real MLflow server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import exp
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from helpers.accounts import status_for_another
from helpers.browser import browser
from helpers.rare import rare
from helpers.simulated_run import SimulatedRun
from helpers.site import Site, until

from slurmtrain.model.run.layout import RunsRoot

OLDER, NEWER = "0aaaaaaaaa", "0aaaaaaaab"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A runs root with two runs of an experiment, of which MLflow knows nothing yet."""
    site = Site(tmp_path)
    for run_id in (OLDER, NEWER):
        make_run(site, run_id)
    return site


def make_run(site: Site, run_id: str, uri: str | None = None) -> None:
    """A run that trains."""
    run = SimulatedRun(RunsRoot(site.runs).run(run_id), spec={"name": "digits", "tracking": {"mlflow": {"uri": uri}}})
    run.submitted().started().reached(3, loss=0.5).reached(4, loss=0.25).saved(4)


@contextmanager
def showing(site: Site, *arguments: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A ``ui``, and the address that it has printed."""
    command = [sys.executable, "-m", "slurmtrain", "ui", *arguments, "--json"]
    process = subprocess.Popen(
        command,
        cwd=site.path,
        env={**site.environment(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.communicate()


def ask(address: str, method: str, host: str = "", **data: Any) -> Any:
    """What the server's API answers to a page in a browser, which sees the server as ``host``."""
    server = address.partition("/#")[0]
    netloc = host or urlsplit(server).netloc
    request = urllib.request.Request(
        f"{server}/ajax-api/2.0/mlflow/{method}",
        data=json.dumps(data).encode() if data else None,
        headers={"Content-Type": "application/json", "Host": netloc, "Origin": f"http://{netloc}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def free_ports() -> tuple[int, int]:
    """Two ports in a row that nobody listens on."""
    while True:
        with closing(socket.create_server(("127.0.0.1", 0))) as first:
            port = first.getsockname()[1]
            if port < 65535:
                try:
                    socket.create_server(("127.0.0.1", port + 1)).close()
                except OSError:
                    continue
                return port, port + 1


def have_ended(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_the_runs_of_an_experiment_are_shown_and_the_server_dies_with_the_command(site: Site) -> None:
    port, following = free_ports()
    with socket.create_server(("127.0.0.1", port)), showing(site, "--port", str(port)) as (process, address):
        assert address.startswith(f"http://127.0.0.1:{following}/#/experiments/")
        experiment = address.partition("/experiments/")[2].partition("/runs?")[0]
        named = ask(address, f"experiments/get?experiment_id={experiment}")["experiment"]["name"]
        # Through a tunnel, the browser sees another port.
        shown = ask(address, "runs/search", host="localhost:9999", experiment_ids=[experiment])["runs"]
        other = Site(site.path / "other")
        make_run(other, OLDER, address.partition("/#")[0])
        page_there = other.call("ui", "digits", cwd=site.path).stdout.strip()
        servers = psutil.Process(process.pid).children(recursive=True)
        everybody = [psutil.Process(process.pid), *servers]
        listening = [
            each.laddr.ip for one in everybody for each in one.net_connections("inet") if each.status == "LISTEN"
        ]
        refused = status_for_another(address.partition("/#")[0])
        process.kill()
        _, errors = process.communicate(timeout=60)
        until(lambda: have_ended(servers), "the end of the server")
    assert (named, len(shown)) == ("digits", 2)
    assert [each["value"] for each in shown[0]["data"]["metrics"] if each["key"] == "loss"] == [0.5]
    assert listening == ["127.0.0.1"]
    assert refused in (None, "403")
    # A server that runs already is not started: it has the run of the other runs root, too.
    assert page_there.startswith(f"{address.partition('?')[0]}/")
    assert f"port {port} is not available; using {following} instead\n" in errors


def test_a_run_has_its_own_page_an_ssh_session_gets_the_line_for_a_tunnel_and_ctrl_c_is_no_error(site: Site) -> None:
    port, _ = free_ports()
    ssh = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 2222", "DISPLAY": ":99", "BROWSER": "false"}
    # What is on this machine is asked for without a proxy.
    ssh |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    with showing(site, NEWER, "--port", str(port), **ssh) as (process, address):
        shown, _, page = address.partition("/runs/")[2].partition("/")
        tags = ask(address, f"runs/get?run_id={shown}")["run"]["data"]["tags"]
        servers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert {"key": "slurmtrain.run_id", "value": NEWER} in tags
    assert page.startswith("model-metrics?")
    assert f"ssh -N -L {port}:127.0.0.1:{port} -p 2222 " in errors
    assert process.returncode == 0
    assert have_ended(servers)


def test_a_run_that_is_not_in_mlflow_is_an_error_that_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert "there are no runs in " in site.call("ui", code=2).stderr
    SimulatedRun(RunsRoot(site.runs).run(OLDER), spec={"name": "digits"}).submitted().started()
    error = site.call("ui", "digits", code=2).stderr
    assert f"MLflow has nothing of run {OLDER}: " in error
    assert "tracking.mlflow.enabled is false" in error


# --- what a person sees -----------------------------------------------------------------------------------------------

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
# How many curves the charts have, by the name of their metric: MLflow draws each of them twice.
CURVES = """
const cards = document.querySelectorAll('[data-testid="experiment-view-compare-runs-card"]')
return Object.fromEntries([...cards].map(card => [
    card.innerText.split('\\n')[0],
    new Set([...card.querySelectorAll('.trace path.js-line')].map(path => path.getAttribute('d'))).size]))
"""
# In a new browser, MLflow opens a panel beside its page: closes it; returns whether it was open.
CLOSE_PANEL = "const close = document.querySelector('button[aria-label=Close]'); close?.click(); return close !== null"


@rare
@pytest.mark.parametrize(
    ("name", "picture", "curves"), [("0sweep0000", "ui-sweep", 6), ("0aaaaaaaa3", "ui-run", 1)], ids=["sweep", "run"]
)
def test_a_browser_shows_curves_on_the_first_page(tmp_path: Path, name: str, picture: str, curves: int) -> None:
    site = Site(tmp_path)
    for number, lr in enumerate((0.02, 0.03, 0.05, 0.08, 0.13, 0.2)):
        add_trained(site, f"0aaaaaaaa{number}", lr, sweep="0sweep0000")
    # Of another sweep, and deleted before MLflow knew it.
    add_trained(site, "0aaaaaaaa6", 0.3, sweep="0sweep0001")
    add_trained(site, "0aaaaaaaa7", 0.4, sweep="0sweep0000").command("delete", bytes=1, by="ada@login")
    with showing(site, name) as (_, address), browser(tmp_path) as page:
        page.open(address)
        expected = {"loss": curves, "accuracy": curves}
        page.wait_for(CURVES, lambda shown: shown.items() >= expected.items())
        page.wait_for(CLOSE_PANEL, lambda was_open: not was_open)
        page.wait_for(CURVES, lambda shown: shown.items() >= expected.items())
        drawn = page.picture()
    assert len(drawn) < 150_000
    if os.environ.get("UPDATE_GOLDEN"):
        (IMAGES / f"{picture}.png").write_bytes(drawn)


def add_trained(site: Site, run_id: str, lr: float, **created: Any) -> SimulatedRun:
    """A run that has trained for 100 steps, and of which MLflow knows nothing."""
    now = 1_795_000_000.0 + 1000 * int(run_id[-1])
    spec = {"name": "digits", "params": {"lr": lr}, "tracking": {}}
    run = SimulatedRun(RunsRoot(site.runs).run(run_id), spec=spec, executor="local", now=now)
    varies = {"params.lr": lr}
    run.write("journal/created.jsonl", "created", name="digits", executor="local", varies=varies, **created)
    run.submitted().started()
    for step in range(1, 101):
        run.reached(step, at=now + step, loss=2.3 * exp(-step * lr) + 0.1, accuracy=1 - 0.9 * exp(-step * lr))
    return run.later(100).saved(100).ended("completed")
