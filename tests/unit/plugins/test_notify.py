"""Messages about runs: what they say, how each receiver gets them, and that each fact is told once."""

from __future__ import annotations

import json
import os
import stat
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import killpoints
from helpers.simulated_run import SimulatedRun
from helpers.webhooks import Webhook, webhook
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.receivers import Receiver
from slurmtrain.model.interruption.policy import with_next_start
from slurmtrain.model.run.layout import RunDir
from slurmtrain.plugins.notify import delivery
from slurmtrain.plugins.notify.delivery import Mailbox, NotDelivered, send
from slurmtrain.plugins.notify.messages import Notice, as_mail, as_request, cleaned, notices_of, trial

NOTICE = Notice(
    key="ended-7.0", kind="failed", at=5.0, run="20261129-1-abc", name="digits", state="failed", why="rank 0 raised",
    step=40, total_steps=100, attempt=2,
)  # fmt: skip
HOSTILE = "a\x1b[31m\n\r<!channel> <@U1> @everyone @here *b* `c` \u202e[x](https://evil) " + "z" * 999


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as each:
        yield each


def mailbox(tmp_path: Path, **receivers: Receiver) -> Mailbox:
    return Mailbox(receivers, tmp_path / ".notify")


# --- what is told -----------------------------------------------------------------------------------------------------


def kinds(sim: SimulatedRun) -> list[tuple[str, str]]:
    return [(notice.kind, notice.key) for notice in notices_of(with_next_start(sim.run))]


def test_the_start_each_preemption_and_the_end_of_a_run_are_facts_with_names_of_their_own() -> None:
    sim = SimulatedRun().created().submitted()
    assert kinds(sim) == []
    sim.started()
    assert kinds(sim) == [("started", "started")]
    sim.ended("preempted").started(1).ended("preempted", 0, 1).started(2)
    assert kinds(sim)[1:] == [("preempted", "preempted-1"), ("preempted", "preempted-2")]
    sim.ended("completed", 0, 2)
    assert kinds(sim)[3:] == [("completed", f"ended-{sim.job}.2")]


def test_a_failed_run_that_was_restarted_before_is_given_up() -> None:
    sim = SimulatedRun().created().submitted().started()
    sim.ended("crash", reason="boom", over="failed")
    [notice] = [each for each in notices_of(sim.run) if each.key.startswith("ended")]
    assert (notice.kind, notice.why) == ("failed", "boom")
    assert notices_of(replace(sim.run, given_up="3 attempts without progress"))[-1].kind == "given_up"
    assert [Receiver(states=("failed",)).wants(kind) for kind in ("failed", "given_up")] == [True, True]
    assert [Receiver(states=("given_up",)).wants(kind) for kind in ("failed", "given_up")] == [False, True]
    third = Receiver(states=("preempted",), every=3)
    assert [number for number in range(1, 8) if third.wants("preempted", number)] == [3, 6]


# --- how it looks -----------------------------------------------------------------------------------------------------


def test_a_message_says_what_which_why_where_and_how_to_see_more() -> None:
    body, headers = as_request(NOTICE, "slack")
    text = json.loads(body)["text"]
    assert text == "digits has failed\nrank 0 raised\nstep 40 of 100, attempt 2\nslurmtrain why 20261129-1-abc"
    assert headers["Idempotency-Key"] == "20261129-1-abc/ended-7.0"
    plain = json.loads(as_request(NOTICE, "json")[0])
    assert (plain["schema"], plain["kind"], plain["step"], plain["run"]) == (1, "failed", 40, "20261129-1-abc")
    assert plain["id"] == headers["Idempotency-Key"]


@pytest.mark.parametrize("form", ["slack", "discord", "ntfy", "json"])
def test_no_text_of_others_means_anything_to_a_receiver(form: str) -> None:
    hostile = replace(NOTICE, name=HOSTILE, why=HOSTILE)
    body, headers = as_request(hostile, form)
    text = body.decode() if form == "ntfy" else json.loads(body).get({"slack": "text", "discord": "content"}.get(form))
    text = text if text is not None else json.loads(body)["why"]
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert all("\n" not in value and "\r" not in value for value in headers.values())
    if form in ("slack", "discord"):
        assert "<!channel>" not in text
        assert "<@U1>" not in text
        assert "@everyone" not in text
        assert "@here" not in text
    if form == "discord":
        assert json.loads(body)["allowed_mentions"] == {"parse": []}
        assert "\\*b\\*" in text
        assert len(text) <= 2000
    assert len(text) < 4000


def test_mail_has_no_header_that_a_name_has_written() -> None:
    mail = as_mail(replace(NOTICE, name="x\nBcc: eve@example.org"), "me@example.org")
    assert b"\nBcc:" not in mail
    assert mail.count(b"\nSubject: ") == 1


@given(st.text())
def test_a_cleaned_text_is_one_line_of_what_can_be_seen(text: str) -> None:
    clean = cleaned(text)
    assert len(clean.splitlines()) <= 1
    assert cleaned(clean) == clean
    clean.encode()


# --- ways -------------------------------------------------------------------------------------------------------------


def test_a_webhook_gets_one_request_and_no_redirect_is_followed(hook: Webhook) -> None:
    send(Receiver(to=hook.url), NOTICE)
    [(path, _, _)] = hook.requests
    assert path == "/secret-token"
    hook.answers = [307]
    with pytest.raises(NotDelivered, match="it answered HTTP 307") as redirected:
        send(Receiver(to=hook.url), NOTICE)
    assert len(hook.requests) == 2
    hook.answers = [500]
    with pytest.raises(NotDelivered, match="it answered HTTP 500") as failed:
        send(Receiver(to=hook.url), NOTICE)
    unreachable = hook.url.replace(hook.url.split(":")[2].split("/")[0], "1")
    with pytest.raises(NotDelivered, match="cannot be reached") as refused:
        send(Receiver(to=unreachable), NOTICE)
    assert not any("secret" in str(each.value) for each in (redirected, failed, refused))


def test_a_receiver_that_answers_byte_by_byte_is_not_waited_for(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_TIMEOUT_S", 0.3)
    hook.drip_s = 0.02
    with pytest.raises(NotDelivered, match=r"did not answer within 0\.3 s"):
        send(Receiver(to=hook.url), NOTICE)


def test_a_url_is_read_from_a_file_that_is_private_and_from_a_variable(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "url"
    path.write_text(f"{hook.url}\n")
    path.chmod(0o644)
    with pytest.raises(NotDelivered, match="others can read"):
        send(Receiver(url_file=str(path)), NOTICE)
    path.chmod(0o600)
    send(Receiver(url_file=str(path)), NOTICE)
    with pytest.raises(NotDelivered, match="the variable HOOK is not set here"):
        send(Receiver(to="${oc.env:HOOK}"), NOTICE)
    monkeypatch.setenv("HOOK", hook.url)
    send(Receiver(to="${oc.env:HOOK}"), NOTICE)
    assert len(hook.requests) == 2


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_mail_goes_through_sendmail_without_an_address_among_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path / "bin" / "sendmail", f'echo "$@" > {tmp_path}/argv; cat > {tmp_path}/mail')
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    send(Receiver(to="mailto:me@example.org"), NOTICE)
    assert (tmp_path / "argv").read_text().split() == ["-i", "-t"]
    mail = (tmp_path / "mail").read_text()
    assert "To: me@example.org" in mail
    assert "Subject: [slurmtrain] digits has failed" in mail
    script(program, "exit 3")
    with pytest.raises(NotDelivered, match="the command exited with 3"):
        send(Receiver(to="mailto:me@example.org"), NOTICE)


def test_a_command_gets_json_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_TIMEOUT_S", 0.5)
    program = script(tmp_path / "tell", f'echo "$1 $SLURMTRAIN_NOTICE_KIND" > {tmp_path}/argv; cat > {tmp_path}/json')
    send(Receiver(command=f"{program} 'two words'"), NOTICE)
    assert (tmp_path / "argv").read_text().strip() == "two words failed"
    assert json.loads((tmp_path / "json").read_text())["name"] == "digits"
    with pytest.raises(NotDelivered, match=r"did not end within 0\.5 s"):
        send(Receiver(command="sleep 60"), NOTICE)
    with pytest.raises(NotDelivered, match="cannot be started"):
        send(Receiver(command="/nowhere/tell"), NOTICE)


def test_other_urls_go_to_apprise_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(NotDelivered, match=r"pip install 'slurmtrain\[notify\]'"):
        send(Receiver(to="tgram://secret/1"), NOTICE)
    deliveries: list[dict[str, Any]] = []

    class Service:
        def add(self, url: str) -> bool:
            return url.startswith("tgram://")

        def notify(self, **message: Any) -> bool:
            deliveries.append(message)
            return True

    fake = types.SimpleNamespace(Apprise=Service, NotifyFormat=types.SimpleNamespace(TEXT="text"))
    monkeypatch.setitem(sys.modules, "apprise", fake)
    send(Receiver(to="tgram://secret/1"), NOTICE)
    assert deliveries == [{"title": "digits has failed", "body": "\n".join(NOTICE.lines), "body_format": "text"}]


# --- each fact once ---------------------------------------------------------------------------------------------------


def test_a_fact_is_told_once_whoever_looks_how_often(hook: Webhook, tmp_path: Path) -> None:
    run, box = RunDir(tmp_path / "run"), mailbox(tmp_path, hook=Receiver(to=hook.url))
    run.path.mkdir()
    for _ in range(3):
        box.deliver(run, [NOTICE], set())
    assert hook.kinds == ["failed"]
    assert box.problems() == []
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in run.notices.iterdir())


def test_a_receiver_that_fails_is_said_and_tried_again_later_and_not_for_ever(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, box = RunDir(tmp_path / "run"), mailbox(tmp_path, hook=Receiver(to=hook.url))
    run.path.mkdir()
    hook.answers = [503]
    box.deliver(run, [NOTICE, replace(NOTICE, key="other")], set())
    assert len(hook.requests) == 1, "a receiver that failed is spared for now"
    assert box.problems() == ["notify.hook did not get the last message: it answered HTTP 503"]
    box.deliver(run, [NOTICE], set())
    assert len(hook.requests) == 1, "it is too early"
    monkeypatch.setattr(delivery, "_AGAIN_S", 0.0)
    box.deliver(run, [NOTICE], set())
    assert box.problems() == []
    assert [message["repeated"] for message in hook.messages] == [False, False]
    hook.answers = [503] * 99
    for _ in range(9):
        box.deliver(run, [replace(NOTICE, key="never")], set())
    assert len(hook.requests) == 2 + 5


def _in_child(action: Any, number: int, root: Path) -> int:
    """The status of a process that does this and is killed right before its ``number``-th effect."""
    pid = os.fork()
    if pid == 0:
        try:
            killpoints.watch(killpoints.kill_at(number), str(root))
            action()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_kill_at_any_moment_loses_no_message_and_repeats_it_only_with_a_word_about_it(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_CLAIMED_S", 600.0)
    number, killed = 0, True
    while killed:
        number += 1
        root = tmp_path / str(number)
        run, box = RunDir(root / "run"), Mailbox({"hook": Receiver(to=hook.url)}, root / ".notify")
        run.path.mkdir(parents=True)
        hook.requests.clear()
        killed = os.WIFSIGNALED(_in_child(lambda run=run, box=box: box.deliver(run, [NOTICE], set()), number, root))
        arrived = len(hook.requests)
        box.deliver(run, [NOTICE], set())
        if run.notices.is_dir() and list(run.notices.iterdir()) and len(hook.requests) == arrived and killed:
            # Somebody may still be sending it; once that cannot be any more, the next look does.
            for path in run.notices.iterdir():
                os.utime(path, (1.0, 1.0))
            box.deliver(run, [NOTICE], set())
        messages = hook.messages
        assert len(messages) >= 1, f"killed at {number}: nobody was told"
        assert len(messages) <= 2
        assert all(message["repeated"] for message in messages[1:]), f"killed at {number}: told twice without a word"
        before = len(messages)
        for path in run.notices.iterdir():
            os.utime(path, (1.0, 1.0))
        box.deliver(run, [NOTICE], set())
        assert len(hook.messages) == before
    assert number > 5


def test_a_trial_message_is_about_no_run() -> None:
    assert "slurmtrain why" not in "\n".join(trial().lines)
