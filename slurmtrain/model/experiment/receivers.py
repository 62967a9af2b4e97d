"""The section `notify` of the configuration: the receivers of messages about runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from slurmtrain.model.experiment import kinds

STATES = ("started", "failed", "completed", "given_up", "idle", "preempted")
"""What somebody can be told of."""
FORMATS = ("slack", "discord", "ntfy", "json")
"""The forms of a message to a URL of http or https."""
# The only interpolation that is needed here: of a variable that holds the secret.
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")
"""A URL that is in an environment variable."""
_MAIL = re.compile(r"mailto:[^\s@,;<>]+@[^\s@,;<>]+")
_WAYS = ("to", "url_file", "command")


check_receiver_name = kinds.matching(r"[a-z][a-z0-9_-]{0,39}", "expected a short name in lower case, such as 'slack'")
"""The check of the name of a receiver: files are named by it, and messages name it."""


def _check_url(text: str) -> None:
    # Without the text, which may be a secret.
    if not (VARIABLE.fullmatch(text) or _MAIL.fullmatch(text) or re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", text)):
        raise ValueError("expected https://..., mailto:you@example.org, ${oc.env:NAME}, or a URL of apprise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """Who is told, and of what."""

    SHORTHAND: ClassVar = "to"
    to: Annotated[str, kinds.text("URL", _check_url)] | None = field(default=None, repr=False)
    """A webhook (`https://...`), `mailto:ADDRESS`, or any URL of [apprise](https://appriseit.com) if it is installed;
    or `${oc.env:NAME}`, an environment variable with such a URL. A URL is a secret, so only you may be able to read
    the file."""
    url_file: Annotated[str, kinds.text("file")] | None = None
    """A file that holds only the URL, and that only you can read; relative to your home directory."""
    command: Annotated[str, kinds.text("command")] | None = None
    """A command, split into words as by a shell, that reads the message as JSON from standard input."""
    format: Annotated[str, kinds.choice(*FORMATS)] | None = None
    """The format of messages to a webhook; by default according to its host, otherwise `json`."""
    states: Annotated[tuple[str, ...], kinds.Items(kinds.choice(*STATES), "list of states")] = (
        "failed", "given_up", "completed", "idle",
    )  # fmt: skip
    """The states that cause a message."""
    every: kinds.Positive = 1
    """With `preempted`: send a message for every Nth preemption of a run."""

    @staticmethod
    def require(written: Mapping[Any, object]) -> None:
        """Raise ValueError unless it is ``written`` how to reach it."""
        if not any(written.get(way) is not None for way in _WAYS):
            raise ValueError("it has no address: set 'to', 'url_file' or 'command'")

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        ways = [way for way in _WAYS if getattr(self, way) is not None]
        if len(ways) > 1:
            yield ways[1], f"{ways[0]!r} is set already, and a receiver takes only one of them"

    @property
    def has_secret(self) -> bool:
        """Whether its URL is written here, and may be a secret."""
        return self.to is not None and not VARIABLE.fullmatch(self.to) and not self.to.startswith("mailto:")

    def wants(self, state: str, number: int = 0) -> bool:
        """Whether it is to be told of a ``state``; ``number``: which preemption of the run it is."""
        if state == "given_up":
            return "given_up" in self.states or "failed" in self.states
        return state in self.states and (state != "preempted" or number % self.every == 0)
