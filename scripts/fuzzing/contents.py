"""What can be wrong with what is in a file: bytes, records, values, rows."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

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
