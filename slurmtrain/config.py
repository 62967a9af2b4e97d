"""Settings of a site, a user and a project: where runs are stored and how they are started by default.

Later sources override earlier ones: ``/etc/xdg/slurmtrain/slurmtrain.yaml``, the user's
``$XDG_CONFIG_HOME/slurmtrain/slurmtrain.yaml``, the nearest ``slurmtrain.yaml`` in the current directory or its
parents, ``SLURMTRAIN_*`` variables, command-line flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Nullable, Section, declare_key

FILE = "slurmtrain.yaml"
PREFIX = "SLURMTRAIN_"
EXECUTORS = ("local", "slurm")
SLURM_INTERVAL_S = 30.0
NODE_EXPIRY_H = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of ``slurmtrain.yaml``. Paths in a file are relative to its directory."""

    runs: str | None = declare_key(
        None,
        Nullable(kinds.text("directory")),
        "The directory of all runs; by default `runs` next to the nearest slurmtrain.yaml or in the current directory.",
    )
    executor: str | None = declare_key(
        None,
        Nullable(kinds.choice(*EXECUTORS)),
        "What starts runs; by default slurm if sbatch is available, else local.",
    )
    registry: str | None = declare_key(
        None, Nullable(kinds.text("file")), "The registry's SQLite file; by default `registry.db` in the runs root."
    )
    slurm_interval: float | None = declare_key(
        None,
        Nullable(kinds.finite_number(10)),
        "Seconds between two queries of Slurm by a command that waits; by default 30, at least 10.",
    )
    node_expiry_hours: float | None = declare_key(
        None,
        Nullable(kinds.finite_number(0)),
        "Hours for which submissions exclude a node that failed a preflight; by default 24; 0: never.",
    )
    mlflow_uri: str | None = declare_key(
        None, Nullable(kinds.text("URI")), "MLflow tracking URI; by default `mlflow.db` in the runs root."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings, with absolute paths."""

    runs: Path
    executor: str | None
    registry: Path
    mlflow_uri: str | None
    slurm_interval: float = SLURM_INTERVAL_S
    node_expiry_hours: float = NODE_EXPIRY_H


# Keys whose values are paths, and keys whose values must be converted to numbers in environment variables.
_PATHS = ("runs", "registry")
_NUMBERS = ("slurm_interval", "node_expiry_hours")


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
    """
    settings: dict[str, Any] = {}
    project = _nearest(cwd)
    for path in _files(project, environ):
        settings.update({key: value for key, value in _read(path).items() if value is not None})
    settings.update(_from_environment(environ, cwd))
    flags = {"runs": str(cwd / Path(runs).expanduser()) if runs else None, "executor": executor}
    settings.update({key: value for key, value in flags.items() if value is not None})
    root = Path(settings.get("runs") or (project.parent if project else cwd) / "runs").resolve()
    return Config(
        runs=root,
        executor=settings.get("executor"),
        registry=Path(settings.get("registry") or root / "registry.db").resolve(),
        mlflow_uri=settings.get("mlflow_uri"),
        slurm_interval=float(settings.get("slurm_interval") or SLURM_INTERVAL_S),
        # Not ``or``, which would replace 0: here that is a valid value.
        node_expiry_hours=float(settings.get("node_expiry_hours", NODE_EXPIRY_H)),
    )


def _nearest(cwd: Path) -> Path | None:
    return next((path for folder in (cwd, *cwd.parents) if (path := folder / FILE).is_file()), None)


def _files(project: Path | None, environ: Mapping[str, str]) -> Iterator[Path]:
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    # The site first, since later files override earlier ones.
    for folder in ("/etc/xdg", home):
        path = Path(folder) / "slurmtrain" / FILE
        if path.is_file():
            yield path
    if project is not None:
        yield project


def _read(path: Path) -> dict[str, Any]:
    from slurmtrain.system.yaml_file import parse_yaml, read_text

    text = read_text(path)
    # An empty spec is a mistake, but an empty configuration is a common way to mark a project's directory.
    if not text.strip():
        return {}
    document = parse_yaml(text, str(path))
    mistakes = list(document.mistakes)

    def report(at: tuple[str, ...], message: str) -> None:
        mistakes.append(Mistake(f"{path}:{document.line_of(at)}", ".".join(at), message))

    return _checked(document.data, report, mistakes, path.parent)


def _from_environment(environ: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    values: dict[str, Any] = {
        f.name: environ[PREFIX + f.name.upper()] for f in fields(Settings) if environ.get(PREFIX + f.name.upper())
    }
    for name in _NUMBERS:
        with contextlib.suppress(KeyError, ValueError):
            # What is not a number stays text, and reading the section reports it.
            values[name] = float(values[name])
    mistakes: list[Mistake] = []

    def report(at: tuple[str, ...], message: str) -> None:
        mistakes.append(Mistake(f"the environment variable {PREFIX}{'_'.join(at).upper()}", "", message))

    return {key: value for key, value in _checked(values, report, mistakes, cwd).items() if value is not None}


def _checked(
    data: Mapping[str, Any], report: Callable[[tuple[str, ...], str], None], mistakes: list[Mistake], base: Path
) -> dict[str, Any]:
    settings = Section(Settings).read(data, (), report)
    if mistakes:
        raise SpecError(mistakes)
    values = {f.name: getattr(settings, f.name) for f in fields(Settings)}
    for key in _PATHS:
        if values[key] is not None:
            values[key] = str((base / Path(values[key]).expanduser()).resolve())
    return values
