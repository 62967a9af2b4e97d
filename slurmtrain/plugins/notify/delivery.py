"""Sending messages to receivers, each fact once, even if a sender is killed.

A fact may be noticed by several processes: node 0's helper, ``watch``, somebody's ``sync``, on several machines. The
one that creates the file ``notices/FACT.RECEIVER.1`` in the run's directory (O_EXCL) sends the message, and then
creates ``FACT.RECEIVER.sent``. If the receiver does not take it, it writes why into its own file, and after a while the
next look tries again with file 2, and so on, a few times.

A kill between the claim and ``sent`` leaves it unknown whether the message arrived. Of the two ways to go on, silence
would be the worse one: what matters most, such as the end of a run at night, would be lost for good. So the claim
expires after ten minutes, and the next look sends the message again, saying that it may be a repetition; webhooks get
the same ``Idempotency-Key``. A fact is told at least once as long as anybody looks, and twice only after such a kill.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmtrain.errors import PathError, SlurmtrainError
from slurmtrain.model.experiment.receivers import VARIABLE, Receiver
from slurmtrain.model.run.layout import RunDir
from slurmtrain.plugins.notify.messages import Notice, as_mail, as_request, cleaned
from slurmtrain.system.files import describe_os_error, make_directory, write_atomically
from slurmtrain.system.owned_files import open_regular, read_checked

_TIMEOUT_S = 10.0
# Nobody can be sending a message for so long.
_CLAIMED_S = 600.0
# How often a message is tried, and how long to wait after the first failure; five times as long after each further one.
_TRIES = 5
_AGAIN_S = 60.0
# Older facts are not sent: a receiver that failed for days must not get everything at once.
OLDEST_S = 86400.0
"""How old a fact may be that is still told."""
_LONGEST_ANSWER = 1024
_MENTIONS = re.compile(r"[@<]")
_HOSTS = {
    "hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy",
}  # fmt: skip


class NotDelivered(Exception):
    """A receiver did not take a message. The text says why, without its URL."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The receivers of a configuration, and how each of them fared last, which a directory beside the runs has."""

    receivers: Mapping[str, Receiver]
    directory: Path

    def begin(self) -> float:
        """When notifications began in this runs root, in seconds since 1970: earlier facts are not sent.

        Raises OSError, PathError.
        """
        make_directory(self.directory, private=True)
        path = self.directory / "since"
        with contextlib.suppress(FileExistsError):
            os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        return path.stat().st_mtime

    def deliver(self, run: RunDir, notices: Iterable[Notice], failed: set[str]) -> None:
        """Tell each receiver the news of a run that it wants and has not been told.

        Args:
            run: The run's directory.
            notices: What there is to tell of it.
            failed: The receivers that did not take a message meanwhile, which are spared; this adds to them.

        Raises:
            OSError, PathError: The run's directory cannot be written.
        """
        for notice in notices:
            for name, receiver in self.receivers.items():
                if name in failed or not receiver.wants(notice.kind, notice.number):
                    continue
                claim = Claim.take(run.notices, f"{notice.key}.{name}")
                if claim is None:
                    continue
                with claim:
                    try:
                        send(receiver, replace(notice, repeated=claim.repeated))
                    except NotDelivered as error:
                        failed.add(name)
                        claim.fail(str(error))
                        self.note(name, str(error))
                    else:
                        claim.confirm()
                        self.note(name, "")

    def note(self, name: str, why: str) -> None:
        """Note how a receiver fared. ``name``: its name; ``why``: why it did not take a message, empty if it did."""
        with contextlib.suppress(OSError, PathError):
            make_directory(self.directory, private=True)
            write_atomically(self.directory / f"{name}.json", json.dumps({"at": time.time(), "why": why}).encode())

    def problems(self) -> list[str]:
        """The receivers that did not take the last message, each as a sentence without a full stop."""
        problems = []
        for name in self.receivers:
            with contextlib.suppress(OSError, PathError, ValueError, KeyError, TypeError):
                if why := str(json.loads(read_checked(self.directory / f"{name}.json"))["why"]):
                    problems.append(f"notify.{name} did not get the last message: {cleaned(why)}")
        return problems


class Claim:
    """The right to send one message; use it as a context."""

    def __init__(self, path: Path, number: int, handle: int, *, repeated: bool) -> None:
        """``path``: without the ``number``; ``handle``: of the file; ``repeated``: another may have sent it."""
        self._path = path
        self._number = number
        self._handle = handle
        self.repeated = repeated

    @classmethod
    def take(cls, directory: Path, name: str) -> Claim | None:
        """The right to send the message with this ``name``; None: it was sent, somebody sends it, or it failed lately.

        ``directory``: of the run's notices. Raises OSError, PathError.
        """
        path, repeated = directory / name, False
        if _sent(path).exists():
            return None
        make_directory(directory, private=True)
        for number in range(1, _TRIES + 1):
            claim = path.with_name(f"{name}.{number}")
            with contextlib.suppress(FileExistsError):
                handle = open_regular(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                return cls(path, number, handle, repeated=repeated)
            age, failed_at = time.time() - claim.stat().st_mtime, _refusal_time(claim)
            if failed_at is None and age < _CLAIMED_S:
                return None
            if failed_at is not None and time.time() - failed_at < _AGAIN_S * 5 ** (number - 1):
                return None
            repeated |= failed_at is None
        return None

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def confirm(self) -> None:
        """Note that the message was sent. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.close(open_regular(_sent(self._path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def fail(self, why: str) -> None:
        """Note ``why`` the message was not taken, so that another process tries again. Raises OSError."""
        os.write(self._handle, json.dumps({"at": time.time(), "why": why}).encode())


def is_sent(directory: Path, key: str, name: str) -> bool:
    """Whether a receiver called ``name`` has been told of a fact with this ``key``, by a ``directory`` of notices."""
    return _sent(directory / f"{key}.{name}").exists()


def _sent(path: Path) -> Path:
    return path.with_name(f"{path.name}.sent")


def _refusal_time(claim: Path) -> float | None:
    """When the message was not taken; None if the claim does not say."""
    with contextlib.suppress(OSError, PathError, ValueError, KeyError, TypeError):
        return float(json.loads(read_checked(claim))["at"])
    return None


# --- ways -------------------------------------------------------------------------------------------------------------


def send(receiver: Receiver, notice: Notice) -> None:
    """Bring a message to a receiver. Raises NotDelivered."""
    if receiver.command is not None:
        variables = {"SLURMTRAIN_NOTICE_RUN": notice.run, "SLURMTRAIN_NOTICE_KIND": notice.kind}
        _call(shlex.split(receiver.command), json.dumps(notice.to_dict()).encode() + b"\n", variables)
        return
    url = _url_of(receiver)
    scheme = urlsplit(url).scheme
    if scheme == "mailto":
        program = shutil.which("sendmail") or shutil.which("sendmail", path="/usr/sbin:/usr/lib")
        if program is None:
            raise NotDelivered("there is no sendmail on this machine")
        # -t: it reads the address from the mail, so that no list of processes shows it.
        _call([program, "-i", "-t"], as_mail(notice, url.removeprefix("mailto:")), {})
    elif scheme in ("http", "https"):
        form = receiver.format or _HOSTS.get(urlsplit(url).hostname or "", "json")
        _in_time(lambda: _post(url, notice, form))
    else:
        _in_time(lambda: _send_by_apprise(url, notice))


def _in_time(deliver: Callable[[], None]) -> None:
    """Deliver a message, but wait only so long: each byte of an answer may come at the last moment, or no name resolve.

    Raises NotDelivered.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            deliver()
        except BaseException as error:  # noqa: BLE001 (it is raised below)
            errors.append(error)

    # Nobody waits for a daemon thread at the end of the process.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if thread.is_alive():
        raise NotDelivered(f"it did not answer within {_TIMEOUT_S:g} s")
    for error in errors:
        raise error


def _url_of(receiver: Receiver) -> str:
    """The URL, from wherever it is. Raises NotDelivered."""
    if receiver.url_file is not None:
        path = Path.home() / Path(receiver.url_file).expanduser()
        try:
            with os.fdopen(open_regular(path), encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise NotDelivered(f"others can read {path}: run 'chmod 600' on it")
                return file.read().strip()
        except OSError as error:
            raise NotDelivered(f"{path}: {describe_os_error(error)}") from None
        except (SlurmtrainError, ValueError) as error:
            raise NotDelivered(str(error)) from None
    assert receiver.to is not None
    if (variable := VARIABLE.fullmatch(receiver.to)) is not None:
        if not (url := os.environ.get(variable[1], "").strip()):
            raise NotDelivered(f"the variable {variable[1]} is not set here")
        return url
    return receiver.to


class _RefusedRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the message is for the receiver in the configuration alone."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def _post(url: str, notice: Notice, form: str) -> None:
    body, headers = as_request(notice, form)
    try:
        request = urllib.request.Request(url, body, dict(headers), method="POST")  # noqa: S310 (checked by send)
        opener = urllib.request.build_opener(_RefusedRedirect())
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            answer.read(_LONGEST_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            redirects = 300 <= error.code < 400
        why = " (redirects are not followed)" if redirects else ""
        raise NotDelivered(f"it answered HTTP {error.code}{why}") from None
    except urllib.error.URLError as error:
        # Not the text of the error, which may have the URL.
        reason = error.reason
        why = describe_os_error(reason) if isinstance(reason, OSError) else type(reason).__name__
        raise NotDelivered(f"it cannot be reached: {why}") from None
    except TimeoutError:
        raise NotDelivered(f"it did not answer within {_TIMEOUT_S:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotDelivered(f"it cannot be reached: {type(error).__name__}") from None


def _call(argv: list[str], text: bytes, variables: Mapping[str, str]) -> None:
    """Run a program that reads the message. Raises NotDelivered."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, **variables}, process_group=0,
        )  # fmt: skip
    except (OSError, IndexError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else "it is empty"
        raise NotDelivered(f"the command cannot be started: {why}") from None
    try:
        process.communicate(text, _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotDelivered(f"the command did not end within {_TIMEOUT_S:g} s") from None
    finally:
        # With all that it has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise NotDelivered(f"the command exited with {process.returncode}")


def _send_by_apprise(url: str, notice: Notice) -> None:
    try:
        import apprise
    except ImportError:
        why = "this URL needs apprise: pip install 'slurmtrain[notify]'"
        raise NotDelivered(why) from None
    service = apprise.Apprise()
    if not service.add(url):
        raise NotDelivered("apprise does not know such a URL")
    # Whatever the service takes for a mention.
    title, body = (_MENTIONS.sub("\\g<0>\u200b", text) for text in (notice.title, "\n".join(notice.lines)))
    if not service.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT):
        raise NotDelivered("apprise could not deliver the message")
