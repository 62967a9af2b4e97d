"""Runs on this machine that start after others."""

from __future__ import annotations

import re

from helpers.site import Site, until

ONCE = {"max_failures": 0}


def test_runs_wait_for_others_and_say_why_they_cannot_start(site: Site) -> None:
    gate = site.path / "gate"
    files = [
        site.commanding("python -c pass", "strict", after="pretrain"),
        site.commanding("echo ${params.dir}", "any", after="afterany:pretrain",
                        params={"dir": "${run.pretrain.dir}"}),
        site.commanding("echo never", "cancelled", after="pretrain"),
        site.commanding("echo never", "last", after=["strict"]),
        site.commanding(f"sh -c 'until [ -e {gate} ]; do sleep 0.1; done; exit 3'", "pretrain", requeue=ONCE),
    ]  # fmt: skip
    runs = site.json("submit", *map(str, files), "--executor", "local")["runs"]
    strict, any_end, cancelled, last, pretrain = (run["id"] for run in runs)
    until(lambda: site.status(strict)["reason"] == "after pretrain (running)", "the wait")
    assert site.status(last)["reason"] == "after strict (pending)"
    lines = site.call("status", "--tree", last).stdout.splitlines()[1:]
    shown = [re.match(r"(\w+)  ( *\w+)", line) for line in lines]
    assert [match.groups() for match in shown if match] == [
        (pretrain, "pretrain"),
        (strict, "  strict"),
        (last, "    last"),
        (any_end, "  any"),
        (cancelled, "  cancelled"),
    ]
    tree = site.json("status", "--tree", last)["runs"]
    assert [(run["id"], run["depth"]) for run in tree][:3] == [(pretrain, 0), (strict, 1), (last, 2)]
    site.call("cancel", cancelled)
    assert site.status(cancelled)["state"] == "cancelled"
    gate.touch()
    site.call("wait", *(run["id"] for run in runs), code=None)
    states = {run["id"]: run for run in site.json("status")["runs"]}
    assert [states[each]["state"] for each in (pretrain, strict, last, any_end)] == [
        *("failed", "failed", "failed", "completed")
    ]
    assert states[strict]["reason"].startswith(f"run {pretrain} (pretrain) failed: rank 0 exited with code 3")
    assert states[last]["reason"].startswith(f"run {strict} (strict) failed: run {pretrain}")
    assert site.printed(any_end) == [f"{site.runs / pretrain}"]
    assert site.printed(last) == []
    # What an override adds is looked up then, and the rest stays as it was.
    site.call("resume", "--from-start", any_end, "command=echo ${run.pretrain.id} ${params.dir}", "--wait")
    assert f"{pretrain} {site.runs / pretrain}" in site.printed(any_end)
    shown = site.call("show", strict).stdout
    assert f"after       {pretrain} pretrain (failed)" in shown
    assert f"before      {last} last (failed)" in shown
    tree = shown[shown.index("\nchain\n") :].splitlines()[2:7]
    assert tree == [
        f"  {pretrain} pretrain (failed)",
        f"    {strict} strict (failed)  <",
        f"      {last} last (failed)",
        f"    {any_end} any (completed)",
        f"    {cancelled} cancelled (cancelled)",
    ]
