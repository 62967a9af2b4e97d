"""What can be wrong with the files, directories and variables that a command finds: what a case changes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from helpers.sample_home import SampleHome

from fuzzing.contents import mutate_file, nasty_value
from fuzzing.places import every_path, mutate_place
from fuzzing.surroundings import OF_SITES, limit, make_too_much, retype


@dataclass(frozen=True, slots=True)
class Mutated:
    """What was changed: sentences for a person, the variables of the environment, and limits of the process."""

    changes: list[str]
    environ: dict[str, str]
    limits: dict[int, int]


def mutate_home(home: SampleHome, random: Random) -> Mutated:
    """Change between one and four things in a home and its environment."""
    mutated = Mutated([], home.environ(), {})
    for _ in range(random.choice([1, 1, 1, 2, 2, 4])):
        kind = random.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])[0]
        # What an earlier change has made impossible is left out.
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, sqlite3.Error):
            mutated.changes.append(_KINDS[kind][1](home, mutated, random))
    # Commands read only what is new since the last one.
    if random.random() < 0.4:
        with contextlib.suppress(OSError):
            mutated.changes.append(_cold_registry(home, mutated, random))
    return mutated


def _some_file(home: SampleHome, random: Random, pattern: str) -> Path:
    files = sorted(path for path in home.path.glob(pattern) if stat.S_ISREG(os.lstat(path).st_mode))
    if not files:
        raise FileNotFoundError(pattern)
    return random.choice(files)


def _files(*patterns: str) -> Callable[[SampleHome, Mutated, Random], str]:
    return lambda home, _mutated, random: mutate_file(_some_file(home, random, random.choice(patterns)), random)


def _place(home: SampleHome, _mutated: Mutated, random: Random) -> str:
    paths = every_path(home.runs)
    # Names near the root matter to every command.
    near = [path for path in paths if len(path.relative_to(home.runs).parts) <= 2]
    groups = [group for group in (near, near, paths, paths, paths, [home.runs]) if group]
    return mutate_place(random.choice(random.choice(groups)), home, random)


def _project(home: SampleHome, _mutated: Mutated, random: Random) -> str:
    path = random.choice([*every_path(home.project)[:6], *every_path(home.path / "home")])
    changed = mutate_place(path, home, random)
    # Who names a FIFO as a spec, as in <(generate), waits for what it will say.
    if path.is_fifo():
        path.unlink()
    return changed


def _cold_registry(home: SampleHome, _mutated: Mutated, _random: Random) -> str:
    (home.runs / "registry.db").unlink()
    return "no registry"


def _sent(home: SampleHome, _mutated: Mutated, random: Random) -> str:
    """Change what the registry says that trackers have."""
    with contextlib.closing(sqlite3.connect(home.runs / "registry.db", timeout=1)) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(sent)")]
        column = random.choice(columns)
        value = random.choice(
            [nasty_value(random), json.dumps(nasty_value(random)), json.dumps({"from": [nasty_value(random)]})]
        )
        # SQLite has integers of 64 bits.
        if not isinstance(value, int | float | str | None) or (isinstance(value, int) and value.bit_length() > 63):
            value = json.dumps(value)
        row = "(SELECT rowid FROM sent ORDER BY rowid LIMIT 1)" if column in ("run_id", "tracker") else "rowid"
        database.execute(f'UPDATE sent SET "{column}" = ? WHERE rowid = {row}', [value])
    return f"sent.{column} = {value!r}"


# {home}: the home's directory.
_VARIABLES = {
    "HOME": ("", "~", "{home}/nowhere", "relative", "/proc"),
    "PATH": ("", "{home}/nowhere", "."),
    "TMPDIR": ("{home}/nowhere", "", "/proc"),
    "TZ": ("", "nonsense", "Pacific/Kiritimati", ":/proc/version", "<-12>12"),
    "TERM": ("", "dumb", "\x1b[31m"),
    "COLUMNS": ("0", "-1", "1", "x", "99999999999999999999"),
    "LINES": ("0", "x"),
    "NO_COLOR": ("", "1"),
    "USER": ("", "\x1b[31mroot", "a b"),
    "LOGNAME": ("", "../x"),
    "XDG_CONFIG_HOME": ("", "~", "{home}/nowhere", "relative"),
    "SLURMTRAIN_RUNS": ("", "~", "{home}/nowhere/x", "/proc/version", "/proc/1", "runs\nx", "."),
    "SLURMTRAIN_REGISTRY": ("", "{home}/nowhere/x.db", "/proc/version", ".", "runs"),
    "SLURMTRAIN_EXECUTOR": ("", "slurm", "docker", "\x1b[31m"),
    "SLURMTRAIN_SLURM_INTERVAL": ("", "0", "-5", "nan", "inf", "1e400", "ten"),
    "SLURMTRAIN_NODE_EXPIRY_HOURS": ("0", "-1", "nan", "1e308"),
    "SLURMTRAIN_MLFLOW_URI": (
        "",
        "http://127.0.0.1:9",
        "sqlite:///{home}/nowhere/x.db",
        "nonsense://x",
        "file:///proc",
    ),
    "SLURMTRAIN_JUNK": ("x",),
    "SLURMTRAIN_RUN_DIR": ("{home}/nowhere", ""),
    "SLURM_JOB_ID": ("1", "x"),
    "SQUEUE_FORMAT": ("%i",),
    "CUDA_VISIBLE_DEVICES": ("", "x,y", "-1"),
    "LANG": ("C", "nonsense"),
    "_SLURMTRAIN_COMPLETE": ("bash_source", "nonsense"),
    **OF_SITES,
}


def _variable(home: SampleHome, mutated: Mutated, random: Random) -> str:
    name = random.choice(sorted(_VARIABLES))
    if random.random() < 0.15:
        mutated.environ.pop(name, None)
        return f"{name} is not set"
    value = random.choice(_VARIABLES[name]).format(home=home.path)
    mutated.environ[name] = value
    return f"{name}={value!r}"


_KINDS: dict[str, tuple[float, Callable[[SampleHome, Mutated, Random], str]]] = {
    "journal": (30, _files("project/runs/*/journal/*.jsonl", "project/runs/*/attempts/*/*.jsonl")),
    "metrics and logs": (3, _files("project/runs/*/attempts/*/metrics.jsonl", "project/runs/*/attempts/*/logs/*")),
    "plan": (
        6,
        _files("project/runs/*/plan.json", "project/runs/*/submissions/*/plan.json", "project/runs/*/spec.yaml"),
    ),
    "launch": (
        4,
        _files("project/runs/*/submissions/*/launch.json", "project/runs/*/lease.json", "project/runs/*/claims/*"),
    ),
    "request": (1, _files("project/runs/*/checkpoint-request.json")),
    "checkpoint": (6, _files("project/runs/*/checkpoints/*/*", "project/runs/*/checkpoints/*/MANIFEST.json")),
    "registry": (8, _files("project/runs/registry.db")),
    "tracking": (1, _files("project/runs/mlflow.db")),
    "trackers' files": (
        5,
        _files("project/runs/csv/*", "project/runs/curves/*", "project/runs/tensorboard/*/*", "project/runs/wandb/*"),
    ),
    "histories": (3, _files("project/runs/.histories/*")),
    "counters": (3, _files("project/runs/counters.jsonl")),
    "sent": (2, _sent),
    "ledger": (2, _files("project/runs/nodes/*.jsonl")),
    "config": (6, _files("project/slurmtrain.yaml", "home/.config/slurmtrain/slurmtrain.yaml")),
    "spec": (12, _files("project/spec.yaml")),
    "slurm": (5, _files("slurm/*.txt")),
    "tree": (18, _place),
    "project": (3, _project),
    "variable": (12, _variable),
    "limit": (2, lambda _home, mutated, random: limit(mutated.limits, random)),
    "too much": (3, lambda home, _mutated, random: make_too_much(home, random)),
    "text that YAML retypes": (3, lambda home, _mutated, random: retype(home, random)),
}
