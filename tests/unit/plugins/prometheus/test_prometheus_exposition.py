"""How metrics reach Prometheus: the text format, the node exporter's file, the endpoint, and Grafana's dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.errors import NotAvailable, PathError, SlurmDown, UserError
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.prometheus import (
    LatestCollection,
    check_client,
    check_textfile,
    exposition_text,
    read_dashboard,
    serving,
    write_textfile,
)
from slurmtrain.plugins.prometheus.families import LABELS, Collection, Families

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from helpers.metered_runs import export, parse, value, write_metered_run


def small_collection(runs: float = 1.0) -> Collection:
    families = Families()
    families["runs"].add(runs, executor='odd "\n\\ text', partition="", state="running")
    return Collection(tuple(families))


def test_the_text_is_what_prometheus_reads(workspace: Workspace) -> None:
    write_metered_run(workspace, ends=False)
    text = export(workspace)
    assert len(parse(text)) > 40
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_labels_are_escaped() -> None:
    [key] = parse(exposition_text(small_collection(), {"user": "ada"}))
    assert dict(key[1])["executor"] == 'odd "\n\\ text'


def test_a_textfile_can_be_read_by_everybody_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "ada.prom"
    path.write_text("old")
    path.chmod(0o600)
    before = os.umask(0o077)
    try:
        write_textfile(path, "new 1\n")
    finally:
        os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new 1\n", 0o644)
    assert os.listdir(tmp_path) == ["ada.prom"]
    with pytest.raises(PathError, match="no such file or directory"):
        write_textfile(tmp_path / "missing" / "ada.prom", "")
    with pytest.raises(UserError, match=r"end in \.prom"):
        check_textfile(tmp_path / "ada.txt")


def test_without_prometheus_client_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NotAvailable, match=r"pip install 'slurmtrain\[prometheus\]'"):
        check_client()


def test_an_endpoint_collects_once_in_a_while_and_goes_on_after_failures() -> None:
    answers: list[Collection | Exception] = [small_collection(3), SlurmDown("no answer"), SlurmDown("no answer")]
    warnings: list[str] = []

    def collect() -> Collection:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def scraped(port: int) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            return value(parse(response.read().decode()), "slurmtrain_runs")

    with serving(LatestCollection(collect, 3600.0, warnings.append), "127.0.0.1", 0, {"user": "ada"}) as port:
        assert [scraped(port), scraped(port)] == [3, 3]
        assert len(answers) == 2, "the second scrape came too early to collect again"
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            serving(LatestCollection(collect, 0.0, warnings.append), "127.0.0.1", port, {}).__enter__()
    answers.insert(0, small_collection(4))
    with serving(LatestCollection(collect, 0.0, warnings.append), "127.0.0.1", 0, {"user": "ada"}) as port:
        assert [scraped(port) for _ in range(3)] == [4, 4, 4], "the last answer is served while there is no newer one"
    assert warnings == ["no answer"]


def expressions(board: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [*queries, *(str(each.get("definition", "")) for each in board["templating"]["list"])]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    board = json.loads(read_dashboard())
    assert board["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time", "annotations"} <= board.keys()
    assert board["id"] is None, "Grafana takes an id for that of a board that it has"
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    covered: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, f"{panel['title']} covers another panel"
        assert max(x for x, _ in cells) < 24
        covered |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_asks_only_for_what_is_exported() -> None:
    exported = {name: family for family in Families() for name in family.exported}
    for query in expressions(json.loads(read_dashboard())):
        for name, _, labels in re.findall(r"(slurmtrain_\w+)(\{([^}]*)\})?", query):
            assert name in exported, query
            used = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\"", labels))
            assert used <= {*exported[name].labels, "user"}, query
        for group in re.findall(r"(?:by|on) ?\(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",")} <= {*LABELS, "user"}, query


def test_every_metric_but_those_about_versions_is_on_the_dashboard_or_in_the_guide() -> None:
    guide = (Path(__file__).resolve().parents[4] / "docs" / "monitoring.md").read_text()
    missing = [family.name for family in Families() if f"`{family.name}`" not in guide]
    assert missing == []
