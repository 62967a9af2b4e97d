"""Which words of a command name files that it reads, and which files or directories that it writes. Pure.

It is a guess from the names of options, and cautious: a word that may be something else is left out. docs/spec.md lists
the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

# Words in the names of options, and of files without an option, for what a program writes or may find there later.
_WRITTEN = re.compile(
    r"out(put)?s?|sav(e|es|ed|ing)|log(s|ging|ger)?|ckpts?|checkpoints?|results?|dump|export(ed)?|writ(e|es|ten|ing)|dest(ination)?"
    r"|target|reports?|traces?|profiles?|caches?|te?mp|snapshots?|metrics?|tensorboard|tb|plots?|figs?|figures?|work|runs?"
    r"|exps?|experiments?|resume|artifacts?|preds?|predictions?|gen|generated|state|history|summary|index|outdir|savedir|logdir|workdir|rundir|o|name|new"
)
# Of these, the words for where a run keeps its results, which two runs cannot share.
_KEPT = re.compile(r"out(put)?s?|sav(e|es|ed|ing)|ckpts?|checkpoints?|results?|exps?|experiments?|snapshots?|work|o")
_PLACES = re.compile(r"dir(ectory)?|path|folder|root|file|to")
_WHOLE = frozenset({"o", "out", "output", "save", "outdir", "savedir", "workdir", "default_root_dir", "hydra.run.dir"})
# What else options of such names may have for a value: switches, numbers, formats.
_NO_PLACE = re.compile(
    r"true|false|yes|no|on|off|none|null|auto|all|best|last|stdout|json|csv|ya?ml|te?xt|html|[-+.\de]+", re.I
)
# Endings of files that programs read: what a word without one of them names is not certain.
_READ = frozenset(
    """
    .arrow .bin .cfg .conf .csv .gz .h5 .hdf5 .ini .json .jsonl .npy .npz .parquet .tar .toml .tsv .txt .vocab .yaml
    .yml .zst
    """.split()  # noqa: SIM905 (a list of names to read, not of strings)
)
# Endings of files that are read, but without a directory before them may also be names of what a library downloads.
_WEIGHTS = frozenset({".model", ".pt", ".pth", ".safetensors"})
# Endings of files that are read, also without an option before them.
_CONFIGURATIONS = frozenset({".cfg", ".conf", ".ini", ".json", ".sh", ".toml", ".yaml", ".yml"})
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?|\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"[/~]")
# What cannot be a plain path.
_NO_PATH = re.compile(r"[\s{}*?\[\]$:,;|<>=\"'@\\]|^-|^$")


class NamedPath(NamedTuple):
    """A path in a command. ``option``: as it is written before it, such as ``--data``; empty if there is none."""

    option: str
    path: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


def paths_read(words: Sequence[str]) -> Iterator[NamedPath]:
    """The relative paths that a command seems to read.

    ``words``: the words of the command, the program's name first.
    """
    for option, value in _values(words):
        suffix = PurePosixPath(value).suffix
        names = _parts(option) + _parts(value.removesuffix(suffix))
        endings = _CONFIGURATIONS | (_READ if option else set()) | (_WEIGHTS if option and "/" in value else set())
        is_file = suffix.lower() in endings or value.startswith(("./", "../"))
        no_path = _ELSEWHERE.match(value) or _NO_PATH.search(value)
        if is_file and not no_path and not any(map(_WRITTEN.fullmatch, names)):
            yield NamedPath(option, value)


def paths_written(words: Sequence[str]) -> Iterator[NamedPath]:
    """The paths under which a command seems to keep its results. ``words``: as in :func:`paths_read`."""
    for option, value in _values(words):
        name, parts = option.lstrip("-").replace("-", "_").lower(), _parts(option)
        is_place = len(parts) > 1 and _PLACES.fullmatch(parts[-1]) and any(map(_KEPT.fullmatch, parts[:-1]))
        if (name in _WHOLE or is_place) and not _NO_PATH.search(value) and not _NO_PLACE.fullmatch(value):
            yield NamedPath(option, value)


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arguments of a command, each with its option, or an empty one."""
    option = ""
    for word in words[1:]:
        match = _OPTION.fullmatch(word)
        if match is None:
            yield option, word
            option = ""
        elif match[2] is not None or match[3]:
            yield match[1] or match[3], match[2] if match[1] else match[4]
            option = ""
        else:
            option = match[1]


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", name) if part]
