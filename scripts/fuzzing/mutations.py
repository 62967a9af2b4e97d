"""What can be wrong with the files, directories and variables that a command finds."""

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
from typing import Any

from helpers.sample_home import SampleHome

from slurmtrain.model.run.events.base import layout
from slurmtrain.model.run.events.kinds import KINDS

ESCAPES = ("\x1b]0;owned\x07", "\x1b[31mred", "\x9b2J", "\r\x1b[K", "\x08\x08", "\u202egpj.exe", "a\nb", "\x00", "\x7f")
# Nothing outside the home that a command could create or rename: it may run as root.
PATHS = ("../../../elsewhere/precious.txt", "/proc/version", "..", "/proc", "~", "", ".", "checkpoints/../../x", "a/b")
_DEEP = 3000


def nasty_value(random: Random) -> Any:
    """A value of JSON or YAML that a reader may not expect."""
    return random.choice(
        [
            lambda: None,
            lambda: random.choice([True, False]),
            lambda: random.choice([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400]),
            lambda: random.choice([0.5, -0.0, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -float("inf")]),
            lambda: random.choice(ESCAPES),
            lambda: random.choice(PATHS),
            lambda: random.choice(["", " ", "x" * 5000, "0", "1e999", "null", "true", "ü" * 300, "\ud800", "${a.b}"]),
            lambda: random.choice([[], {}, [[]], {"": {}}, [None], {"a": [1, {"b": None}]}, [{}] * 50]),
            lambda: [nasty_value(random) for _ in range(random.randrange(4))],
            lambda: {random.choice(["rank", "step", "path", "x", ""]): nasty_value(random)},
        ]
    )()


def mutate_tree(value: Any, random: Random) -> Any:
    """``value``, read from JSON, with one part changed, removed, renamed or added."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        action = random.random()
        rest = {name: each for name, each in value.items() if name != key}
        if action < 0.12:
            return rest
        if action < 0.2:
            return {**rest, random.choice([*value, key + "x", "", "\x1b[1m"]): value[key]}
        if action < 0.3:
            return {**value, random.choice(["t", "kind", "x", "step", "job_id"]): nasty_value(random)}
        return {**value, key: mutate_tree(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [*value[:place], mutate_tree(value[place], random), *value[place + random.randrange(2) :]]
    return nasty_value(random)


_PROCESS = {"host": "h", "boot": "b", "pid": 1, "start": 1}
_SAVED = {"path": "checkpoints/step-40", "step": 40, "bytes": 9, "saved_at": 5.0, "metrics": {"loss": 1.0}}
_FAILURE = {
    "rank": 0,
    "pid": 5,
    "exit_code": 1,
    "signal": None,
    "at": 5.0,
    "error": "ValueError: x",
    "last_lines": ["a"],
}
_POLICY = {"enabled": True, "max_failures": 3, "max_node_failures": 10, "restarts_in_place": 3, "backoff_s": 30}
# Fields of events whose values have a structure.
_EXAMPLES: dict[str, Any] = {
    "process": _PROCESS,
    "processes": {"0": _PROCESS, "1": _PROCESS},
    "failures": [_FAILURE, _FAILURE],
    "checkpoints": [_SAVED],
    "requeue": _POLICY,
    "git": {"commit": "c", "dirty": True},
    "nodes": [1, 2],
    "networks": [{"name": "eth0", "interfaces": {"0": "eth0"}, "addresses": {"0": "10.0.0.1"}}],
    "excluded": [{"node": 0, "interface": "eth1", "why": "down"}],
    "findings": [{"check": "disk", "status": "fail", "summary": "full", "evidence": {"a": 1}}],
    "ranks": [{"rank": 0, "node": 0, "step": 3, "phase": "training", "idle_s": 5.0, "state": "S", "stack": ["a"]}],
    "evidence": {"oom_kills": 1, "kernel": ["line"]},
    "metrics": {"loss": 0.5},
    "codes": {"0": 1},
    "members": [0, 1],
    "lost": [1],
    "past": {"cause": "crash", "began_at_step": 0, "committed": 5, "reached": 8, "where": "x", "foreign": False},
    "cause": "crash",
    "path": "checkpoints/step-40",
    "executor": "local",
    "job_id": "1",
}


def random_event(random: Random) -> dict[str, Any]:
    """An event of any kind, with fields that are absent or unexpected, at any depth."""
    kind = random.choice(sorted(KINDS))
    keys = [field[1] for field in layout(KINDS[kind])]
    record: dict[str, Any] = {}
    for key in keys:
        example = _EXAMPLES.get(key, random.choice([0, 1, 5.5, "1", None]))
        value = random.choices([nasty_value(random), mutate_tree(example, random), example], weights=[2, 3, 3])[0]
        if random.random() < 0.85:
            record[key] = value
    return {"t": random.choice([1.0, 1.7e9, 1e12, nasty_value(random)]), "kind": kind, **record}


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """``content`` damaged as by a disk, a crash or an editor."""
    place = random.randrange(len(content) + 1)
    end = min(len(content), place + random.choice([1, 3, 100, 4096]))
    junk = bytes(random.randrange(256) for _ in range(random.choice([1, 5, 200])))
    return random.choice(
        [
            lambda: b"",
            lambda: content[:place],
            lambda: content[:place] + junk + content[place:],
            lambda: content[:place] + content[end:],
            lambda: content[:place] + bytes(end - place) + content[end:],
            lambda: content[:place] + content[place:end] * 20 + content[end:],
            lambda: content[:place] + junk + content[place + len(junk) :],
            lambda: content + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content[:place] + b"[" * _DEEP + content[place:],
            lambda: content[:place] + b"x" * 200_000 + content[place:],
            lambda: content[:place] + random.choice(ESCAPES).encode() + content[place:],
            lambda: b"\n" * 3 + content,
            lambda: bytes(reversed(content[:5000])),
        ]
    )()


def mutate_lines(content: bytes, random: Random) -> bytes:
    """A file of JSON lines with some changed, lost, repeated or added; each is valid JSON again."""
    lines = content.splitlines()
    for _ in range(random.choice([1, 1, 3])):
        place = random.randrange(len(lines) + 1)
        if place == len(lines) or random.random() < 0.35:
            lines.insert(place, _dumped(random_event(random)))
        elif random.random() < 0.15:
            del lines[place]
        elif random.random() < 0.15:
            lines.insert(random.randrange(len(lines) + 1), lines[place])
        else:
            with contextlib.suppress(ValueError):
                lines[place] = _dumped(mutate_tree(json.loads(lines[place]), random))
    return b"".join(line + b"\n" for line in lines)


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutate_json(content: bytes, random: Random) -> bytes:
    """A JSON document with parts changed; valid JSON again."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    for _ in range(random.choice([1, 1, 2, 4])):
        value = mutate_tree(value, random)
    return _dumped(value)


def mutate_yaml(content: bytes, random: Random) -> bytes:
    """A YAML file with keys changed, or with what only YAML has."""
    if random.random() < 0.3:
        lines = content.splitlines()
        extra = random.choice(
            [b"a: &a [*a]", b"x: !!python/object/apply:os.system [id]", b"\tname: x", b"? [1]\n: 2", b"--- 1", b"a: *b",
             b"name: x", b"<<: {name: y}", b"name: !!binary aGk=", b"time: 2020-01-01", b"n: 1_000", b"%TAG ! !",
             b"extends: spec.yaml", b"extends: [nowhere.yaml, .]", b"extends: {a: 1}", b"extends: /dev/null",
             b'extends: ["\\e[31m.yaml", ../project/spec.yaml]', b"extends: slurmtrain.yaml", b"extends: ''",
             b"sweep: {params.lr: 'range(3)', parallel: 2, pack: 2}", b"sweep: {zip: {params.lr: [1, 2]}}",
             b"sweep: {params.lr: 'loguniform(0, 1)', samples: 3}", b"sweep: {points: [{params.lr: 1}, {a: 1}]}",
             b"sweep: {include: [{params.lr: {a: 1}}], exclude: [{}]}", b"sweep: {pack: {runs: 2, share_gpu: 3}}"]
        )  # fmt: skip
        lines.insert(random.randrange(len(lines) + 1), extra)
        return b"\n".join(lines) + b"\n"
    import yaml

    try:
        value = yaml.safe_load(content)
    except yaml.YAMLError:
        return content
    for _ in range(random.choice([1, 2, 3])):
        value = mutate_tree(value, random)
    # JSON is YAML, and can say more: NaN, keys of any text.
    return _dumped(value)


def mutate_file(path: Path, random: Random) -> str:
    """Change a file in a way that suits it; says how."""
    content = path.read_bytes()
    if random.random() < 0.35:
        new, kind = mutate_bytes(content, random), "bytes"
    elif path.suffix == ".jsonl":
        new, kind = mutate_lines(content, random), "records"
    elif path.suffix == ".json":
        new, kind = mutate_json(content, random), "values"
    elif path.suffix in (".yaml", ".yml"):
        new, kind = mutate_yaml(content, random), "keys"
    elif path.suffix == ".db":
        return f"database {path.name}: {mutate_database(path, random)}"
    else:
        new, kind = mutate_bytes(content, random), "bytes"
    path.write_bytes(new)
    return f"{kind} of {path}"


def mutate_database(path: Path, random: Random) -> str:
    """Change a SQLite file by SQL, as a newer version or a careless person does."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path, timeout=1)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = random.choice(tables or ["x"])
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')] or ["x"]
        column = random.choice(columns)
        statement = random.choice(
            [
                f'DELETE FROM "{table}"',
                f'DROP TABLE "{table}"',
                f'UPDATE "{table}" SET "{column}" = NULL',
                f'UPDATE "{table}" SET "{column}" = \'\x1b[31mjunk\'',
                f'UPDATE "{table}" SET "{column}" = \'[1, {{\'',
                f'UPDATE "{table}" SET "{column}" = -1',
                f'UPDATE "{table}" SET "{column}" = X\'ff00\'',
                f'UPDATE "{table}" SET "{column}" = 1e300',
                f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
                f'ALTER TABLE "{table}" ADD COLUMN added TEXT',
                f"PRAGMA user_version = {random.choice([0, 1, 7, 10**6])}",
                "CREATE TABLE other (x)",
                f"CREATE TRIGGER t BEFORE INSERT ON \"{table}\" BEGIN SELECT RAISE(ABORT, 'no'); END",
            ]
        )
        with database:
            database.execute(statement)
        return statement
    return "refused by SQLite"


# --- directories ------------------------------------------------------------------------------------------------------

_NAMES = (b".new-0000000000", b".new-zzzzzzzzzz", b"step-99999999999999999999", b"step--1", b"step-50", b"7.x",
          b"a\nb.jsonl", b"\xff\xfe.jsonl", b"\x1b[31m.jsonl", b"x" * 250, b"0123456789", b"....", b"-rf",
          b"node-x.jsonl", b"99999999999999999999.0", b".trash-step-9", b".1.0-step-50", b"damaged-step-9",
          b"-1.-1", b"CON", b"1.0.0", b" ")  # fmt: skip


def every_path(root: Path) -> list[Path]:
    """All paths below a directory, in a fixed order."""
    return [Path(folder) / name for folder, folders, files in os.walk(root) for name in sorted([*folders, *files])]


def mutate_place(path: Path, home: SampleHome, random: Random) -> str:
    """Remove, replace, rename or protect what is at ``path``, or add something next to it; says what was done."""
    change = random.choice(sorted(_PLACES))
    _PLACES[change](path, home, random)
    return f"{change}: {path}"


def _remove(path: Path, home: SampleHome, _random: Random) -> None:
    # Set aside, so that the judge can tell what this has removed from what the command has.
    path.rename(home.path / "tmp" / f"removed-{len(os.listdir(home.path / 'tmp'))}")


def _directory(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    path.mkdir(0o700)


def _file(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    path.write_bytes(random.choice([b"", b"junk\n", b"{}", b"\x00" * 100]))
    path.chmod(0o600)


def _link(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    elsewhere = home.path / "elsewhere"
    nowhere = home.path / "nowhere"
    target = random.choice([elsewhere / "precious.txt", elsewhere, path, nowhere, "/proc/version", "..", home.runs])
    path.symlink_to(target)


def _moved_and_linked(path: Path, home: SampleHome, _random: Random) -> None:
    target = home.path / "elsewhere" / "moved"
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path, home: SampleHome, random: Random) -> None:
    _remove(path, home, random)
    os.mkfifo(path, 0o600)


def _mode(path: Path, _home: SampleHome, random: Random) -> None:
    path.chmod(random.choice([0o000, 0o200, 0o400, 0o500, 0o644, 0o666, 0o755, 0o777, 0o1777, 0o2770]))


def _rename(path: Path, _home: SampleHome, random: Random) -> None:
    target = os.fsencode(path.parent) + b"/" + random.choice(_NAMES)
    if not os.path.lexists(target):
        os.rename(os.fsencode(path), target)


def _extra(path: Path, _home: SampleHome, random: Random) -> None:
    folder = path if path.is_dir() else path.parent
    target = os.fsencode(folder) + b"/" + random.choice(_NAMES)
    if os.path.lexists(target):
        return
    if random.random() < 0.4:
        os.mkdir(target, 0o700)
    else:
        with open(target, "wb") as file:
            file.write(b'{"t": 1.0, "kind": "created"}\n' * random.randrange(3))


def _times(path: Path, _home: SampleHome, random: Random) -> None:
    at = random.choice([0, 1, 2**31, 2**33, 4_000_000_000])
    os.utime(path, (at, at), follow_symlinks=False)


def _grown(path: Path, _home: SampleHome, random: Random) -> None:
    if path.is_file():
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + random.choice([1, 4096, 40 * 2**20]))


def _hard_link(path: Path, home: SampleHome, _random: Random) -> None:
    # Caches and locks are rewritten in place.
    if path.is_file() and path.suffix != ".db" and not path.name.startswith("."):
        os.link(path, home.path / "elsewhere" / "linked")


_PLACES: dict[str, Callable[[Path, SampleHome, Random], None]] = {
    "removed": _remove,
    "a directory instead": _directory,
    "a file instead": _file,
    "a link instead": _link,
    "moved, and a link to it": _moved_and_linked,
    "a FIFO instead": _fifo,
    "its mode": _mode,
    "renamed": _rename,
    "a neighbour": _extra,
    "its times": _times,
    "zeros at its end": _grown,
    "a hard link to it": _hard_link,
}


# --- what a case may change -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutated:
    """What was changed: sentences for a person, and the variables of the environment."""

    changes: list[str]
    environ: dict[str, str]


def mutate_home(home: SampleHome, random: Random) -> Mutated:
    """Change between one and four things in a home and its environment."""
    mutated = Mutated([], home.environ())
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
    "variable": (8, _variable),
}
