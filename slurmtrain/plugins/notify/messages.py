"""The messages about a run, and their form for each kind of receiver. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from email.header import Header
from email.message import EmailMessage
from typing import Any

from slurmtrain.model.run.run import Run
from slurmtrain.version import __version__

# Controls, separators of lines, and characters that reorder or hide text: names and reasons may come from others.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]+"
)
_LONGEST = 500
# Discord refuses longer ones.
_MOST_OF_DISCORD = 1900
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-!|>~<])")
# After these, a run is started again by itself without anything being wrong with it.
_INTERRUPTIONS = frozenset({"preempted", "timeout", "node_fail", "cancelled", "completed", "grow", None})
_VERBS = {
    "started": "has started", "failed": "has failed", "completed": "has completed", "idle": "is idle",
    "given_up": "has failed again, and will not be restarted", "preempted": "was preempted",
}  # fmt: skip
_PRIORITIES = {"failed": "4", "given_up": "4", "idle": "4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A fact about a run that somebody may be told.

    ``key``: names the fact among all of the run's. ``kind``: as in the configuration. ``at``: seconds since 1970.
    ``number``: which preemption of the run it is. ``repeated``: a message about it may have arrived already.
    """

    key: str
    kind: str
    at: float
    run: str
    name: str
    state: str
    why: str = ""
    step: int | None = None
    total_steps: int | None = None
    attempt: int = 0
    number: int = 0
    repeated: bool = False

    @property
    def title(self) -> str:
        """The message in a line."""
        times = f", for the {_ordinal(self.number)} time" if self.kind == "preempted" and self.number > 1 else ""
        return cleaned(f"{self.name} {_VERBS[self.kind]}{times}")

    @property
    def lines(self) -> list[str]:
        """What is said below it."""
        total = "" if self.total_steps is None else f" of {self.total_steps}"
        lines = [
            cleaned(self.why),
            "" if self.step is None else f"step {self.step}{total}, attempt {self.attempt}",
            f"slurmtrain why {self.run}" if self.run else "",
            "(a message about this may have arrived before)" if self.repeated else "",
        ]
        return [line for line in lines if line]

    def to_dict(self) -> dict[str, Any]:
        """This as JSON: for receivers without a form of their own."""
        facts = {name: cleaned(value) if isinstance(value, str) else value for name, value in asdict(self).items()}
        del facts["key"]
        command = f"slurmtrain why {self.run}" if self.run else None
        return {"schema": 1, "id": self.id, **facts, "title": self.title, "command": command}

    @property
    def id(self) -> str:
        """By which receivers recognise a repetition."""
        return f"{self.run}/{self.key}"


def cleaned(text: str) -> str:
    """A text on one line, without characters that are not visible, and not too long."""
    text = " ".join(_UNSAFE.sub(" ", text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def notices_of(run: Run) -> list[Notice]:
    """All notices about a run according to its journals, which do not record idleness.

    Args:
        run: The run, with what starts it again.
    """
    base = Notice(
        key="", kind="", at=0.0, run=run.id, name=run.name, state=run.state, why=run.reason, step=run.step,
        total_steps=run.total_steps, attempt=len(run.attempts),
    )  # fmt: skip
    notices = []
    if run.started_at is not None:
        # Whatever has happened since, it is no reason for the start.
        notices.append(replace(base, key="started", kind="started", at=run.started_at, why="", step=None))
    preempted = [each for each in run.attempts if each.cause == "preempted" and each.ended_at is not None]
    for number, attempt in enumerate(preempted, 1):
        of_attempt = replace(base, why=attempt.reason, step=attempt.last_step, attempt=attempt.number)
        notices.append(
            replace(of_attempt, key=f"preempted-{number}", kind="preempted", number=number, at=attempt.ended_at or 0.0)
        )
    newest = run.newest
    if newest is not None and run.state in ("completed", "failed", "lost"):
        kind = "completed"
        if run.state != "completed":
            restarted = any(each.cause not in _INTERRUPTIONS for each in run.attempts[:-1]) or bool(newest.restarts)
            kind = "given_up" if restarted or run.given_up else "failed"
        notices.append(replace(base, key=f"ended-{newest.key}", kind=kind, at=run.ended_at or newest.ended_at or 0.0))
    return notices


def trial() -> Notice:
    """A message by which somebody sees that messages arrive."""
    return Notice(
        key="trial", kind="started", at=0.0, run="", name="slurmtrain notify --test", state="",
        why="This is a test message: messages about runs will look like this.",
    )  # fmt: skip


# --- forms ------------------------------------------------------------------------------------------------------------


def as_request(notice: Notice, form: str) -> tuple[bytes, Mapping[str, str]]:
    """The body and headers of a request that brings a message to a webhook.

    Args:
        notice: The message.
        form: One of the formats of the configuration.
    """
    headers = {"User-Agent": f"slurmtrain/{__version__}", "Idempotency-Key": notice.id}
    if form == "ntfy":
        # Anything but ASCII would have to be encoded: its server decodes RFC 2047.
        title = (
            Header(notice.title, "utf-8", maxlinelen=10_000).encode() if not notice.title.isascii() else notice.title
        )
        priority = _PRIORITIES.get(notice.kind, "3")
        return "\n".join(notice.lines).encode(), {**headers, "Title": title, "Priority": priority}
    plain: dict[str, Any]
    if form == "slack":
        text = "\n".join([notice.title, *notice.lines])
        # What Slack gives a meaning, such as <!channel>, begins with one of these.
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")
        plain = {"text": text, "mrkdwn": False, "link_names": False}
    elif form == "discord":
        text = _MARKDOWN.sub(r"\\\1", "\n".join([notice.title, *notice.lines])).replace("@", "@\u200b")
        plain = {"content": text[:_MOST_OF_DISCORD], "allowed_mentions": {"parse": []}}
    else:
        plain = notice.to_dict()
    return json.dumps(plain).encode(), {**headers, "Content-Type": "application/json"}


def as_mail(notice: Notice, address: str) -> bytes:
    """A message as mail to an ``address``."""
    mail = EmailMessage()
    mail["To"] = address
    mail["Subject"] = f"[slurmtrain] {notice.title}"
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Slurmtrain-Notice"] = notice.id
    mail.set_content("\n".join([notice.title, *notice.lines, ""]))
    return mail.as_bytes()


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
