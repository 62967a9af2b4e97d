"""Settings of a site, a user and a project: where runs are stored, how they are started, and prices of nodes.

Later sources override earlier ones: ``/etc/xdg/slurmtrain/slurmtrain.yaml``, the user's
``$XDG_CONFIG_HOME/slurmtrain/slurmtrain.yaml``, the nearest ``slurmtrain.yaml`` in the current directory or its
parents, ``SLURMTRAIN_*`` variables, command-line flags.

A file decides where runs are kept and which server they are sent to, so only files that can be trusted are read
(:mod:`slurmtrain.system.owned_files`). One in a parent directory that is not the user's is passed over, as if it were
not there: in a directory that several people share, anybody can create one. Any other such file is an error: without
it, the runs would silently be kept elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from slurmtrain.errors import Mistake, PathError, SpecError, UntrustedPath
from slurmtrain.model.experiment.kinds import (
    CONFIRM_GPU_HOURS,
    CONFIRM_RUNS,
    MAX_RUNS,
    Amount,
    Entries,
    Positive,
    Section,
    choice,
    finite_number,
    text,
)
from slurmtrain.model.experiment.prices import Prices
from slurmtrain.model.experiment.receivers import Receiver, check_receiver_name
from slurmtrain.model.urls import DatabaseUrl, check_tracking_uri, is_url, read_database_url
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.inherited import expand_home
from slurmtrain.system.owned_files import check_owner, follow_links, open_regular, user_name

FILE = "slurmtrain.yaml"
PREFIX = "SLURMTRAIN_"
EXECUTORS = ("local", "slurm")
SHARING = ("none", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of ``slurmtrain.yaml``. Paths in a file are relative to its directory."""

    runs: Annotated[str, text("directory")] | None = None
    """The directory of all runs; by default `runs` next to the nearest slurmtrain.yaml or in the current directory."""
    shared: Annotated[str, choice(*SHARING)] | None = None
    """Who shares the directory of all runs: none, or its group; then everybody's runs are in `<runs>/<user>`."""
    executor: Annotated[str, choice(*EXECUTORS)] | None = None
    """What starts runs; by default slurm if sbatch is available, else local."""
    registry: Annotated[str, text("file or URL")] | None = None
    """The registry's SQLite file, by default `registry.db` in the runs root, or a database on a PostgreSQL server:
    `postgresql+psycopg://user@host/database`."""
    slurm_interval: Annotated[float, finite_number(10)] | None = None
    """Seconds between two queries of Slurm by a command that waits; by default 30, at least 10."""
    node_expiry_hours: Amount | None = None
    """Hours for which submissions exclude a node that failed a preflight; by default 24; 0: never."""
    mlflow_uri: Annotated[str, text("URI", check_tracking_uri)] | None = None
    """MLflow tracking URI, without a password; by default `mlflow.db` in the runs root."""
    sweep_max_runs: Positive | None = None
    """How many runs a sweep may have; by default 10000."""
    sweep_confirm_runs: Positive | None = None
    """`submit` asks before it submits a sweep of more runs than this; by default 1000."""
    sweep_confirm_gpu_hours: Amount | None = None
    """`submit` asks before it submits a sweep that may take more GPU-hours than this; by default 1000."""
    prices: Prices | None = None
    """Hourly prices by partition, for [`slurmtrain cost`](../cost.md); null: costs are in GPU-hours."""
    notify: (
        Annotated[
            Mapping[str, Receiver],
            Entries(Section(Receiver), "mapping from names to receivers", check_receiver_name),
        ]
        | None
    ) = None
    """Receivers of [messages about runs](../notify.md), by name."""


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings, with absolute paths.

    ``shared_root``: the directory that a group shares, where ``runs`` is the user's own; None: nobody else uses it.
    ``notify_file``: the file that names the receivers of ``notify``. ``notes``: facts for the user about where the
    settings come from.
    """

    runs: Path
    executor: str | None
    registry: Path | DatabaseUrl
    mlflow_uri: str | None
    slurm_interval: float = 30.0
    node_expiry_hours: float = 24.0
    sweep_max_runs: int = MAX_RUNS
    sweep_confirm_runs: int = CONFIRM_RUNS
    sweep_confirm_gpu_hours: float = CONFIRM_GPU_HOURS
    prices: Prices | None = None
    notify: Mapping[str, Receiver] = field(default_factory=dict)
    notify_file: Path | None = None
    shared_root: Path | None = None
    notes: tuple[str, ...] = ()

    def choose_executor(self, requested: str | None = None) -> str:
        """What starts runs: what is ``requested``, else configured, else slurm if sbatch is found, else local."""
        if chosen := requested or self.executor:
            return chosen
        import shutil

        return "slurm" if shutil.which("sbatch") else "local"


@dataclass(frozen=True, slots=True)
class _File:
    """A configuration file, as it was when its owner was checked."""

    path: Path
    content: bytes
    is_private: bool


# Keys whose values are paths, keys that are no environment variables, and keys whose values there become numbers.
_PATHS = ("runs", "registry")
ONLY_IN_FILES = ("prices", "notify")
_NUMBERS: Mapping[str, type] = {
    "slurm_interval": float, "node_expiry_hours": float, "sweep_confirm_gpu_hours": float, "sweep_max_runs": int,
    "sweep_confirm_runs": int,
}  # fmt: skip


def load_config(
    *, cwd: Path, environ: Mapping[str, str], runs: str | None = None, executor: str | None = None
) -> Config:
    """Merge all sources.

    Args:
        cwd: The current directory; the project's file is searched for in it and its parents.
        environ: The environment variables.
        runs: The value of ``--runs``, if given.
        executor: The value of ``--executor``, if given.

    Raises:
        SpecError: With all mistakes of the first source that has any.
        PathError: A file cannot be read, or not be trusted.
    """
    # Later sources override earlier ones, key by key.
    settings: dict[str, Any] = {}
    notes: list[str] = []
    project = _nearest(cwd, notes)
    notify_file = None
    for file in _files(project, environ):
        of_file = _read_file(file)
        notify_file = file.path if "notify" in of_file else notify_file
        settings |= of_file
    settings |= _read_variables(environ, cwd)
    flags = {"runs": str(cwd / expand_home(runs)) if runs else None, "executor": executor}
    settings |= {key: value for key, value in flags.items() if value is not None}
    root = follow_links(settings.get("runs") or (project.path.parent if project else cwd) / "runs")
    shared_root = root if settings.get("shared") == "group" else None
    if shared_root is not None:
        root = shared_root / user_name(os.geteuid())
    return Config(
        runs=root,
        executor=settings.get("executor"),
        registry=registry_address(settings.get("registry"), root),
        mlflow_uri=settings.get("mlflow_uri"),
        prices=settings.get("prices"),
        notify=settings.get("notify") or {},
        notify_file=notify_file,
        shared_root=shared_root,
        notes=tuple(notes),
        # Keys that no source has keep their defaults; 0 is a value.
        **{name: number(settings[name]) for name, number in _NUMBERS.items() if name in settings},
    )


def read_receivers(path: Path) -> Mapping[str, Receiver]:
    """The receivers that a configuration file names, whose path a job was given; none if it is not there.

    Raises:
        SpecError, PathError: It has mistakes, or cannot be read or trusted.
    """
    file = _open(path)
    return {} if file is None else _read_file(file).get("notify") or {}


def registry_address(registry: str | DatabaseUrl | None, root: Path) -> Path | DatabaseUrl:
    """Where the registry of the runs in ``root`` is. ``registry``: what the settings say. Raises PathError."""
    if isinstance(registry, DatabaseUrl):
        return registry.of_root(root)
    path = follow_links(registry) if registry else root / "registry.db"
    if not path.name:
        raise PathError(f"the registry cannot be {path}: it must be a file; correct 'registry' or SLURMTRAIN_REGISTRY")
    return path


def _nearest(cwd: Path, notes: list[str]) -> _File | None:
    """The project's file. ``notes`` receives why others were passed over. Raises PathError."""
    for folder in (cwd, *cwd.parents):
        try:
            file = _open(folder / FILE)
        except UntrustedPath as error:
            # In this very directory, or the user's own: to pass it over would keep runs elsewhere without an error.
            if folder == cwd or _is_mine(folder / FILE):
                raise
            notes.append(f"{error.why}: it is ignored; copy it to a directory of yours if you want its settings")
            continue
        if file is not None:
            return file
    return None


def _files(project: _File | None, environ: Mapping[str, str]) -> Iterator[_File]:
    try:
        home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config")
    except RuntimeError:
        home = Path()  # nobody knows it
    # The site first, since later files override earlier ones.
    for folder in (Path("/etc/xdg"), home):
        # Relative paths are to be ignored here (XDG Base Directory Specification).
        file = _open(folder / "slurmtrain" / FILE) if folder.is_absolute() else None
        if file is not None:
            yield file
    if project is not None:
        yield project


def _open(path: Path) -> _File | None:
    """A file's content; None if there is none. Raises PathError, and UntrustedPath."""
    try:
        with os.fdopen(open_regular(follow_links(path)), "rb") as file:
            # By the open file: another one may have its path by now.
            mode = os.fstat(file.fileno()).st_mode
            return _File(path, file.read(), is_private=not mode & (stat.S_IRWXG | stat.S_IRWXO))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        with contextlib.suppress(OSError):
            # Whose it is comes first: in a parent directory, somebody else's file is passed over, readable or not.
            check_owner(path.stat(), path)
        raise PathError(f"{path}: cannot be read: {describe_os_error(error)}") from error


def _is_mine(path: Path) -> bool:
    """Whether the entry itself, be it a link, is this user's."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _read_file(file: _File) -> dict[str, Any]:
    from slurmtrain.system.yaml_file import decode_text, parse_yaml

    path, text = file.path, decode_text(file.content, file.path)
    # An empty spec is a mistake, but an empty configuration is a common way to mark a project's directory.
    if not text.strip():
        return {}
    document = parse_yaml(text, str(path))
    mistakes = list(document.mistakes)

    def report(at: tuple[str, ...], message: str) -> None:
        mistakes.append(Mistake(document.place_of(at), ".".join(at), message))

    return _checked(document.data, report, mistakes, path.parent, secrets=file.is_private)


def _read_variables(environ: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """The values of environment variables."""
    names = [f.name for f in fields(Settings) if f.name not in ONLY_IN_FILES]
    values: dict[str, Any] = {name: text for name in names if (text := environ.get(PREFIX + name.upper()))}
    for name, number in _NUMBERS.items():
        with contextlib.suppress(KeyError, ValueError):
            # What is not a number stays text, and reading the section reports it.
            values[name] = number(values[name])
    mistakes: list[Mistake] = []

    def report(at: tuple[str, ...], message: str) -> None:
        mistakes.append(Mistake(f"the environment variable {PREFIX}{'_'.join(at).upper()}", "", message))

    return _checked(values, report, mistakes, cwd, secrets=False)


def _checked(
    data: Mapping[str, Any],
    report: Callable[[tuple[str, ...], str], None],
    mistakes: list[Mistake],
    base: Path,
    *,
    secrets: bool,
) -> dict[str, Any]:
    """The values that a source has, with absolute paths. Raises SpecError with its mistakes.

    Args:
        data: The source's keys.
        report: Adds to the mistakes.
        mistakes: Mistakes that are known already.
        base: Paths are relative to this directory.
        secrets: Whether only the user can read the source, so that it may hold a password.
    """
    settings = Section(Settings).read(data, (), report)
    values = {f.name: value for f in fields(Settings) if (value := getattr(settings, f.name)) is not None}
    if is_url(values.get("registry", "")):
        try:
            values["registry"] = url = read_database_url(values["registry"])
            if url.password is not None and not secrets:
                report(
                    ("registry",),
                    "has a password, which others could read here; keep it in ~/.pgpass, or in a file that only you "
                    "can read (chmod 600)",
                )
        except ValueError as error:
            report(("registry",), str(error))
    for name, receiver in (values.get("notify") or {}).items():
        if receiver.has_secret and not secrets:
            report(
                ("notify", name, "to"),
                "has a URL here that others can read; make the file readable by you alone (chmod 600), or use "
                "'url_file' or ${oc.env:NAME}",
            )
    if mistakes:
        raise SpecError(mistakes)
    for key in _PATHS:
        if isinstance(values.get(key), str):
            # Not resolved: whose a link is matters.
            values[key] = str(base / expand_home(values[key]))
    return values
