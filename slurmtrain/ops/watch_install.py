"""Having a watch started by systemd or cron: what they are to be told, in their own ways of quoting."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmtrain.config import PREFIX
from slurmtrain.errors import PlaceError, UserError
from slurmtrain.system import templates
from slurmtrain.system.files import make_directory, reason_of, write_atomically

# Variables by which Python and Slurm's commands are found and set up, and the user's configuration is.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "SLURM_CONF", "XDG_CONFIG_HOME")
_KEPT_SETTINGS = ("REGISTRY", "MLFLOW_URI", "NODE_EXPIRY_HOURS")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# The shortest that a line of a crontab may be cut to.
_CRON_LINE = 998
_NAME_LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is to be watched, and from where: absolute paths, and the variables that are kept."""

    runs: Path
    workdir: Path
    python: str
    variables: Mapping[str, str]
    every: float

    @property
    def name(self) -> str:
        """A name of its own for each runs root, of letters, digits, dots, dashes and underscores."""
        words = [re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") for part in self.runs.parts[-2:]]
        digest = hashlib.sha256(str(self.runs).encode(errors="surrogateescape")).hexdigest()[:6]
        return "-".join([*filter(None, ["-".join(filter(None, words))[:_NAME_LENGTH].strip("-.")]), digest])


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of systemd's as it was written; ``changed``: whether it, or an older one, was not there like this."""

    path: Path
    changed: bool
    commands: tuple[str, ...]


def watched(runs: Path, every: float, *, workdir: Path, environ: Mapping[str, str]) -> Watched:
    """What this Python is to watch, with as much of the environment as it needs, and no password."""
    names = [*_KEPT, *(PREFIX + name for name in _KEPT_SETTINGS)]
    kept = {name: environ[name] for name in names if environ.get(name)}
    variables = {name: value for name, value in kept.items() if _is_plain(value) and not _holds_password(value)}
    return Watched(runs=runs, workdir=workdir, python=sys.executable, variables=variables, every=every)


def write_unit(wanted: Watched, environ: Mapping[str, str]) -> Unit:
    """Write the unit below the user's configuration, for its owner alone; a second time changes nothing.

    Returns it with the commands that make systemd start it. Raises UserError for paths that no unit can hold,
    PlaceError where the file cannot be written.
    """
    config = _config_home(environ)
    path = config / "systemd" / "user" / f"slurmtrain-watch-{wanted.name}.service"
    text = unit_text(wanted, config / "slurmtrain" / "watch.env").encode()
    make_directory(path.parent)
    try:
        before = path.read_bytes() if path.exists() else None
        if before != text:
            write_atomically(path, text)
    except OSError as error:
        raise PlaceError(f"cannot write {path}: {reason_of(error)}") from error
    commands = ["systemctl --user daemon-reload", f"systemctl --user enable --now {path.name}"]
    if before not in (None, text):
        commands.append(f"systemctl --user restart {path.name}")
    return Unit(path, before != text, (*commands, "loginctl enable-linger"))


def unit_text(wanted: Watched, secrets: Path) -> str:
    """The unit. ``secrets``: a file of variables that it reads if there is one. Raises UserError."""
    return _render("systemd.service.j2", wanted, secrets=secrets)


def cron_line(wanted: Watched) -> str:
    """The line of a crontab that does single rounds. Raises UserError for paths that cron would change."""
    for path in (str(wanted.runs), str(wanted.workdir), wanted.python):
        _check(path, "a line of a crontab")
        if "\\" in path:
            raise UserError(f"{path!r} holds a backslash, which a line of a crontab cannot; use --install systemd")
    # A variable with a backslash, which some crons drop, is better not set than set wrongly.
    variables = {name: value for name, value in wanted.variables.items() if "\\" not in value}
    line = _render("crontab.j2", wanted, variables=variables, schedule=schedule(wanted.every))
    return line.strip().replace("%", "\\%")


def is_long(line: str) -> bool:
    """Whether some crons would cut this line."""
    return len(line.encode(errors="surrogateescape")) > _CRON_LINE


def schedule(every: float) -> str:
    """The first five fields of a crontab's line: minutes, as far as an hour."""
    minutes = max(1, round(every / 60))
    if minutes == 1:
        return "* * * * *"
    return f"*/{minutes} * * * *" if minutes < 60 else "0 * * * *"


def literal(value: object) -> str:
    """A value of systemd's that is taken as it stands, but for specifiers (systemd.unit(5)). Raises UserError."""
    text = str(value)
    _check(text, "a unit of systemd's")
    if text != text.strip() or text.endswith("\\"):
        raise UserError(f"{text!r} begins or ends with what systemd does not keep; rename that directory")
    return text.replace("%", "%%")


def quoted(value: object) -> str:
    """A word of systemd's in quotes (systemd.syntax(7)), in which ``$`` means nothing. Raises UserError."""
    text = str(value)
    _check(text, "a unit of systemd's")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def program(value: object) -> str:
    """The path of a program, in which systemd allows neither quotes nor backslashes. Raises UserError."""
    text = str(value)
    if set(text) & set("\"'\\"):
        raise UserError(f"{text!r} holds quotes or backslashes, so systemd would not start it; rename that directory")
    return quoted(text)


def argument(value: object) -> str:
    """An argument of a command of systemd's, in which ``$`` would name a variable (systemd.service(5))."""
    return quoted(value).replace("$", "$$")


def _render(name: str, wanted: Watched, **more: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates.directory() / "watch"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 (no HTML; every value goes through a filter that quotes it)
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "literal": literal,
        "quoted": quoted,
        "program": program,
        "argument": argument,
        "word": _word,
    }
    facts = {"runs": wanted.runs, "workdir": wanted.workdir, "python": wanted.python, "every": f"{wanted.every:g}"}
    text: str = environment.get_template(name).render({**facts, "variables": wanted.variables, **more})
    return text


def _word(value: object) -> str:
    """A word of the shell's."""
    return shlex.quote(str(value))


def _check(text: str, what: str) -> None:
    if not _is_plain(text):
        raise UserError(f"{text!r} holds characters that {what} cannot; rename that directory")


def _is_plain(text: str) -> bool:
    """Whether a text has no line breaks and the like, and is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return _CONTROL.search(text) is None


def _holds_password(value: str) -> bool:
    try:
        return "://" in value and urlsplit(value).password is not None
    except ValueError:
        return True


def _config_home(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CONFIG_HOME", "")
    # A relative one is to be ignored (XDG Base Directory Specification).
    return Path(given) if Path(given).is_absolute() else Path(environ.get("HOME") or Path.home()) / ".config"


def has_user_systemd() -> bool:
    """Whether this machine seems to have a systemd that users can ask."""
    return shutil.which("systemctl") is not None
