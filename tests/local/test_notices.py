"""People are told what becomes of real runs: by the runs' own jobs, and by what syncs later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.site import Site, until
from helpers.webhooks import Webhook, webhook


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as each:
        yield each


def configure(site: Site, mode: int = 0o600, **receivers: Any) -> Path:
    path = site.path / "slurmtrain.yaml"
    path.write_text(json.dumps({"notify": receivers}))
    path.chmod(mode)
    return path


def test_the_job_tells_of_its_start_and_end_and_nobody_else_does_it_again(site: Site, hook: Webhook) -> None:
    configure(site, hook={"to": hook.url, "states": ["started", "completed", "failed"]})
    run_id = site.submit(site.light(params={"steps": 2}))
    # It only looks.
    finished = site.until_state(run_id, "completed")
    until(lambda: hook.kinds == ["started", "completed"], f"the messages: {hook.kinds}")
    message = hook.messages[-1]
    assert (message["run"], message["name"], message["state"], message["step"]) == (run_id, "light", "completed", 2)
    assert message["command"] == f"slurmtrain why {run_id}"
    site.call("sync")
    site.call("watch", "--once")
    assert len(hook.requests) == 2
    # A failure: who tells of it, the job or a sync, does not matter.
    broken = site.submit(site.commanding("false", requeue={"max_failures": 0}))
    site.until_state(broken, "failed")
    site.call("sync")
    until(lambda: len(hook.requests) >= 4, "the failure is told")
    site.call("sync")
    assert sorted(hook.kinds[2:]) == ["failed", "started"]
    by_kind = {message["kind"]: message for message in hook.messages[2:]}
    assert "exited with code 1" in by_kind["failed"]["why"]
    # The URL is a secret.
    for directory in (Path(finished["dir"]), site.runs / ".notify"):
        files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
        assert files
        assert not any(b"secret-token" in path.read_bytes() for path in files)


def test_a_receiver_that_does_not_answer_is_said_and_fails_no_run(site: Site, hook: Webhook) -> None:
    configure(site, hook={"to": hook.url, "states": ["completed"]})
    hook.answers = [503] * 9
    run_id = site.submit(site.light(params={"steps": 2}), "--wait")
    assert site.status(run_id)["state"] == "completed"
    # The job tells of its end when that can be seen already.
    until(lambda: (site.runs / ".notify" / "hook.json").exists(), "the answer of the receiver")
    problem = "notify.hook did not get the last message: it answered HTTP 503"
    assert problem in site.call("sync", code=None).stderr
    [event] = [json.loads(line) for line in site.call("watch", "--once", "--json", code=1).stdout.splitlines()]
    assert (event["kind"], event["message"]) == ("problem", problem)
    findings = site.json("doctor", "--executor", "local")["findings"]
    assert [finding["text"] for finding in findings if finding["about"] == "notify"] == [problem]
    hook.answers = []
    answer = site.call("notify", "--test")
    assert "test message sent" in answer.stdout
    assert "secret-token" not in answer.stdout + answer.stderr
    assert problem not in site.call("notify").stderr


def test_a_url_that_others_can_read_is_refused(site: Site, hook: Webhook) -> None:
    path = configure(site, 0o644, hook=hook.url)
    refused = site.call("status", code=2)
    assert f"{path}:1" in refused.stderr
    assert "notify.hook.to" in refused.stderr
    assert "chmod 600" in refused.stderr
    assert "secret-token" not in refused.stderr
