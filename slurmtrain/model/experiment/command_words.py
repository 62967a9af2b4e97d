"""The words of a command: files that it reads and writes, what its script imports, and what is hardly ever meant so.

Which words name files is a guess from the names of options, and cautious: a word that may be something else is left
out. docs/reference/spec.md lists the rules.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from slurmtrain.model.experiment.kinds import KeyPath, nearest
from slurmtrain.model.experiment.launcher import PLACEHOLDERS as NODE_PLACEHOLDERS
from slurmtrain.model.experiment.launcher import SHELLS
from slurmtrain.model.experiment.values import texts_in, value_at

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
    for option, value in _arguments_of(words):
        suffix = PurePosixPath(value).suffix
        names = _name_parts(option) + _name_parts(value.removesuffix(suffix))
        endings = _CONFIGURATIONS | (_READ if option else set()) | (_WEIGHTS if option and "/" in value else set())
        is_file = suffix.lower() in endings or value.startswith(("./", "../"))
        no_path = _ELSEWHERE.match(value) or _NO_PATH.search(value)
        if is_file and not no_path and not any(map(_WRITTEN.fullmatch, names)):
            yield NamedPath(option, value)


def paths_written(words: Sequence[str]) -> Iterator[NamedPath]:
    """The paths under which a command seems to keep its results. ``words``: as in :func:`paths_read`."""
    for option, value in _arguments_of(words):
        name, parts = option.lstrip("-").replace("-", "_").lower(), _name_parts(option)
        # An option such as --save_steps has a word for results, and names no place.
        is_place = len(parts) > 1 and _PLACES.fullmatch(parts[-1]) and any(map(_KEPT.fullmatch, parts[:-1]))
        if (name in _WHOLE or is_place) and not _NO_PATH.search(value) and not _NO_PLACE.fullmatch(value):
            yield NamedPath(option, value)


def _arguments_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
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


def _name_parts(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", name) if part]


DIRECTORY, FILE, UNKNOWN = "directory", "file", "unknown"
_ANY_PLACEHOLDER = re.compile(r"\{\w+\}")
# Stands for a placeholder in a path: a name that no directory has.
_UNKNOWN_NAME = "_slurmtrain_placeholder_"
# Options whose values are directories, such as --output_dir, --savedir and --default_root_dir.
_OF_DIRECTORIES = re.compile(r"(dir|directory|folder)$", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[{]")
# Endings of files that programs write; whatever else a path ends in, it may be a directory's name, such as "v1.5".
_FILES = frozenset(
    """
    .bin .ckpt .csv .db .gz .h5 .hdf5 .joblib .json .jsonl .log .md .npy .npz .onnx .out .parquet .pdf .pickle .pkl .png
    .pt .pth .safetensors .tar .tsv .txt .yaml .yml .zip
    """.split()  # noqa: SIM905 (a list of names to read, not of strings)
)


class ResultPlace(NamedTuple):
    """A place for results, which may not be there yet.

    ``path``: relative to the repository. ``kind``: :data:`DIRECTORY`, :data:`FILE`, or :data:`UNKNOWN`.
    """

    path: str
    kind: str


def result_places(words: Sequence[str], pattern: str | None, workdir: str, root: str) -> list[ResultPlace]:
    """The places in a repository, or next to it, that a command writes to by a path relative to its working directory.

    Args:
        words: Words of the command, placeholders included; of a path, the part before the first placeholder counts.
        pattern: ``checkpoint.glob``, whose directories count.
        workdir: Where the command runs, absolute.
        root: The repository, absolute.
    """
    written = paths_written([_ANY_PLACEHOLDER.sub(_UNKNOWN_NAME, word) for word in words])
    results: dict[ResultPlace, None] = {}
    places = list(map(_place_of, written))
    if pattern:
        parents = PurePosixPath(pattern).parents
        places.append(ResultPlace(str(next(each for each in parents if not _WILDCARD.search(str(each)))), DIRECTORY))
    for place in places:
        absolute = posixpath.normpath(posixpath.join(workdir, place.path))
        path = posixpath.relpath(absolute, root)
        # A place further up is not beside a copy of the repository, and all of the working directory is no place.
        is_beside = not path.startswith("../..") and not f"{workdir}/".startswith(f"{absolute.rstrip('/')}/")
        if is_beside and not place.path.startswith(("/", "~")):
            results[ResultPlace(path, place.kind)] = None
    return list(results)


def _place_of(named: NamedPath) -> ResultPlace:
    path = PurePosixPath(named.path)
    if _UNKNOWN_NAME in named.path:
        before = next(parent for parent in path.parents if _UNKNOWN_NAME not in str(parent))
        return ResultPlace(str(before), DIRECTORY)
    if path.suffix.lower() in _FILES:
        return ResultPlace(str(path), FILE)
    is_directory = named.path.endswith("/") or _OF_DIRECTORIES.search(named.option)
    return ResultPlace(str(path), DIRECTORY if is_directory else UNKNOWN)


class ScriptImport(NamedTuple):
    """An import at the top level of a script, outside of conditions.

    ``package``: the first part of the module's name. ``certain``: nothing before it can change what is imported:
    neither other code nor a module that does not belong to Python itself.
    """

    package: str
    line: int
    certain: bool


def script_imports(source: bytes) -> list[ScriptImport]:
    """The imports of a script that Python itself does not come with, in their order.

    Of a script that this version of Python cannot parse there are none.
    """
    try:
        with warnings.catch_warnings():
            # Such as the warning about an invalid escape sequence: Python itself prints it when the script runs.
            warnings.simplefilter("ignore")
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    imports = []
    certain = True
    for statement in body:
        packages: list[str] = []
        if isinstance(statement, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            packages = [statement.module.partition(".")[0]]
        foreign = [package for package in packages if package not in sys.stdlib_module_names]
        imports += [ScriptImport(package, statement.lineno, certain and package == foreign[0]) for package in foreign]
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        certain = certain and not foreign and (bool(packages) or is_text)
    return imports


# What commands may have in braces: docs/reference/spec.md.
PLACEHOLDERS = (
    *NODE_PLACEHOLDERS, "resume_from", "resume_dir", "resume_tag", "run_dir", "checkpoint_dir", "run_id", "attempt",
)  # fmt: skip
# Braces as for an interpolation, but without the dollar sign: {params.lr}, or {lr}.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBERS = re.compile(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})+")
# Words that only a shell understands, and a variable.
_OF_SHELL = re.compile(r"&&|\|\|?|;|&|[0-9]?>>?(?:&[0-9])?|<|.*;|~.*")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# What only a shell has: no program has these names, or none that does what is meant.
_BUILTINS = frozenset(
    {".", "alias", "cd", "eval", "exec", "export", "module", "pushd", "set", "source", "ulimit", "umask", "unset"}
)
# How similar a name in braces must be to a placeholder to be a slip.
_SLIP = 0.8
_ABSENT = object()


def find_failures(template: Mapping[str, Any]) -> Iterator[str]:
    """What a command has that can only fail: a key of the spec in braces that mean nothing to anybody.

    ``template``: the spec before interpolation: what an interpolation inserts into the command is meant.
    """
    for word in _words(template.get("command", "")):
        # A word with quotes, or a backslash before its braces, is passed on as it is on purpose.
        for name in _BRACES.findall("" if re.search(r"[\"'\\]", word) else word):
            keys = [name] * ("." in name) + [f"params.{name}"]
            key = next((key for key in keys if value_at(template, key.split("."), _ABSENT) is not _ABSENT), None)
            if key is not None and name not in PLACEHOLDERS:
                yield (
                    f"{{{name}}} is not a placeholder; write ${{{key}}} for the value of that key, or '{{{name}}}', "
                    "with quotes inside the command, to keep the braces"
                )


def find_oversights(plain: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a spec, as plain data, whose values are hardly meant so, each with a message that says what may be meant.

    What can only fail is a mistake (:func:`find_failures`), anything else is allowed.
    """
    command = plain["command"]
    for name in dict.fromkeys(_BRACES.findall(command)):
        near = None if name in PLACEHOLDERS else nearest(name, PLACEHOLDERS, _SLIP)
        if near:
            yield ("command",), f"{{{name}}} is passed on as it is; did you mean {{{near}}}?"
    words = _words(command)
    # The text that a shell runs, behind its option -c, is left out.
    option = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    if words and words[0].rpartition("/")[2] in SHELLS:
        words = [*words[: option + 1], *words[option + 2 :]]
    odd = next((word for word in words if _OF_SHELL.fullmatch(word)), None)
    odd = odd or next((name[0] for word in words if word[:1] != "'" and (name := _VARIABLE.search(word))), None)
    problem = of_shell(words[0]) if words else ""
    if problem or odd:
        why = f": {problem}" if problem else f", and {odd!r} is passed on as it is"
        yield ("command",), f"the command does not run in a shell{why}; write {in_shell(command)}, or a script"
    for path, text in texts_in(plain["params"], ("params",)):
        if NUMBERS.fullmatch(text):
            name = ".".join(path)
            yield path, f"{text!r} is text; for a run with each number: --sweep {name}={text}; for a list: [{text}]"


def in_shell(command: str) -> str:
    """A command that lets a shell run this one."""
    return f"bash -c {shlex.quote(command)}"


def of_shell(word: str) -> str:
    """What the first word of a command is, if only a shell can run it; else empty."""
    if word in _BUILTINS:
        return f"{word!r} is a shell command, not a program"
    return f"{word!r} sets a variable, and only a shell can do that" if _ASSIGNMENT.match(word) else ""


def _words(command: str) -> list[str]:
    """The words of a command with their quotes: what is quoted is meant."""
    try:
        return shlex.split(command, posix=False)
    except ValueError:  # a backslash before a quote, which this mode does not know
        return []
