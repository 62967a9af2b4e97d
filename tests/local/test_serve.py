"""``slurmtrain serve`` as typed, and in real browsers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.accounts import status_for_another
from helpers.browser import Browser, browser
from helpers.crowded_root import crowd
from helpers.queried_runs import SWEEP, write_run, write_sweep
from helpers.rare import rare
from helpers.simulated_run import SimulatedRun
from helpers.site import Site, until
from helpers.workspaces import make_workspace

from slurmtrain.model.run.layout import RunsRoot

RUN = "0000000009"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A runs root with a sweep and a run that trains."""
    site = Site(tmp_path)
    workspace = make_workspace(site.runs)
    write_sweep(workspace)
    write_run(workspace, 9, "training", state="running", metrics={"loss": 0.5})
    return site


@contextmanager
def serving(site: Site, *arguments: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A ``serve``, and what it has printed."""
    command = [sys.executable, "-m", "slurmtrain", "serve", *arguments, "--json"]
    environ = {**site.environment(), **more}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=site.path, env=environ, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def reach(site: Site, step: int) -> None:
    """The run that trains goes on."""
    sim = SimulatedRun(RunsRoot(site.runs).run(RUN), executor="local", job="local-9", now=time.time())
    sim.reached(step, loss=1 / step)


def test_it_listens_on_this_machine_until_a_signal_and_leaves_nothing(site: Site) -> None:
    port = str(free_port())
    # What any command that looks leaves.
    site.call("status")
    before = {path.name for path in site.runs.iterdir()}
    with serving(site, "--port", port, SSH_CONNECTION="10.0.0.1 50000 10.0.0.2 2222") as (process, address):
        listening = [each.laddr.ip for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
        refused = site.call("serve", "--port", port, code=None)
        with serving(site, "--port", str(free_port())) as (other, second):
            assert status_for_another(address["url"].partition("?")[0]) in (None, "403")
            other.kill()
            other.wait()
            socket.create_server(("127.0.0.1", second["port"])).close()
        # A stream that is open keeps neither signal from ending it.
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(), urllib.request.ProxyHandler({}))
        assert opener.open(address["url"]).url == f"http://127.0.0.1:{port}/"
        stream = opener.open(f"http://127.0.0.1:{port}/events/run/{RUN}")
        assert stream.readline() == b"retry: 2000\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 3
        stream.close()
    assert listening == ["127.0.0.1"]
    assert refused.returncode == 2
    assert f"port {port} of 127.0.0.1 cannot be used: another process listens there; choose another" in refused.stderr
    assert process.returncode == 0
    assert errors.splitlines() == [
        f"to open this address on your own machine, run there: {address['tunnel']}",
        "Ctrl-C ends it",
    ]
    assert address["tunnel"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} -p 2222 ")
    assert address["url"] == f"http://127.0.0.1:{port}/?token={address['token']}"
    assert {path.name for path in site.runs.iterdir()} == before


def test_where_no_browser_can_be_opened_that_is_said(site: Site) -> None:
    with serving(site, "--open", "--port", str(free_port()), DISPLAY="", WAYLAND_DISPLAY="") as (process, _):
        until(lambda: psutil.Process(process.pid).num_threads() > 1, "the server")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "there is no screen here to open a browser on" in errors
    assert process.returncode == 0


# --- what people see --------------------------------------------------------------------------------------------------

# The cells of the table of runs, by the run's id.
ROWS = """
return Object.fromEntries([...document.querySelectorAll('#runs-table tbody tr')].map(row => [
    row.querySelector('a')?.innerText, [...row.children].map(cell => cell.innerText)]))
"""
DRAWN = "return document.documentElement.dataset.drawn"
LIVE = "return document.getElementById('live')?.className"


@contextmanager
def two_browsers(place: Path) -> Iterator[tuple[Browser, Browser]]:
    with ExitStack() as stack:
        for name in ("first", "second"):
            (place / name).mkdir()
        yield (
            stack.enter_context(browser(place / "first")),
            stack.enter_context(browser(place / "second")),
        )


# The second reader's place, and what is chosen there.
PLACE = """
const [list] = document.querySelectorAll('#curves select')
return [list?.value, Math.round(document.getElementById('curves')?.getBoundingClientRect().top ?? 0)]
"""


@rare
def test_two_browsers_follow_a_run_without_losing_what_their_readers_do(site: Site, tmp_path: Path) -> None:
    with serving(site, "--interval", "0.5") as (process, address), two_browsers(tmp_path) as (first, second):
        server = address["url"].partition("?")[0]
        for page in (first, second):
            page.open(address["url"])
            page.wait_for(LIVE, lambda state: state == "good")
            assert page.run("return location.href") == server
            page.run("window.stays = true")
        # The first reader sorts by name, and is typing what to look for.
        first.run("""
            [...document.querySelectorAll('#runs-table th button')].find(each => each.innerText === 'name').click()
            const field = document.querySelector('#runs input[type=search]')
            field.focus(); field.value = 'light'; field.dispatchEvent(new Event('input'))
        """)
        run_id = site.submit(site.light(params={"steps": 100_000, "step_ms": 10}))
        for page in (first, second):
            page.wait_for(ROWS, lambda rows: run_id in rows)
            assert page.run("return window.stays")
        # The second reader goes on to the run's own page.
        second.run(f"document.querySelector('a[href$=\"{run_id}\"]').click()")
        second.wait_for("return location.pathname", lambda path: path == f"/run/{run_id}")
        second.wait_for(PLACE, lambda found: found[0] is not None)
        second.run("""
            window.stays = true
            const [list] = document.querySelectorAll('#curves select')
            list.value = 'time'; list.dispatchEvent(new Event('change'))
            document.getElementById('curves').scrollIntoView()
        """)
        chosen, drawn = second.run(PLACE), second.run(DRAWN)
        second.wait_for(DRAWN, lambda at: at > drawn)
        assert second.run(PLACE) == chosen
        # Text that is selected stays until the reader has copied it.
        second.run("getSelection().selectAllChildren(document.querySelector('#curves h2'))")
        second.wait_for(LIVE, lambda state: state == "warn")
        assert second.run("return getSelection().toString()") == "Curves"
        second.run("getSelection().removeAllRanges()")
        second.wait_for(LIVE, lambda state: state == "good")
        assert second.run(PLACE) == chosen
        site.call("cancel", run_id)
        first.wait_for(ROWS, lambda rows: "cancelled" in rows.get(run_id, ()))
        second.wait_for("return document.querySelector('#head .state').innerText", lambda state: state == "cancelled")
        assert second.run("return window.stays")
        kept = first.run("""
            const field = document.activeElement
            return [window.stays, field.type, field.value, field.selectionStart,
                document.querySelector('#runs-table th[aria-sort]').innerText]
        """)
        shown = first.run(ROWS)
        second.run("document.querySelector('#head a').click()")
        second.wait_for("return location.href", lambda address: address == server)
        second.open(f"{server}run/{SWEEP}")
        second.wait_for("return location.pathname", lambda path: path == f"/sweep/{SWEEP}")
        second.wait_for(ROWS, lambda rows: len(rows) == 6)
        complaints = [*first.complaints(), *second.complaints()]
        addresses = [*first.requests(), *second.requests()]
        process.terminate()
        process.wait(timeout=60)
        first.wait_for(LIVE, lambda state: state == "bad")
        assert "the server does not answer" in first.run("return document.getElementById('live').innerText")
    assert kept == [True, "search", "light", len("light"), "name"]
    assert list(shown) == [run_id]
    assert complaints == []
    assert {each for each in addresses if not each.startswith(server)} == set()


@rare
def test_a_root_of_a_thousand_runs_is_followed_by_a_server_that_rests(tmp_path: Path) -> None:
    site = Site(tmp_path)
    workspace = make_workspace(site.runs)
    crowd(workspace, swept=1000)
    write_run(workspace, 9, "training", state="running", metrics={"loss": 0.5})
    with serving(site, "--interval", "0.5") as (process, address), browser(tmp_path) as page:
        page.open(address["url"])
        page.wait_for(LIVE, lambda state: state == "good")
        used = psutil.Process(process.pid)
        began, cpu = time.monotonic(), sum(used.cpu_times()[:2])
        for step in range(200, 260):
            reach(site, step)
            time.sleep(0.25)
        load = (sum(used.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
        find = "const field = document.querySelector('input[type=search]')\nfield.value = 'training'\n"
        page.run(f"{find}field.dispatchEvent(new Event('input'))")
        page.wait_for(ROWS, lambda rows: "259" in rows.get(RUN, ()))
        assert page.complaints() == []
    assert load < 0.4
