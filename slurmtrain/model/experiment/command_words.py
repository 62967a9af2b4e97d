"""The words of a command: files that it reads and writes, what its script imports, and what is hardly ever meant so.

Which words name files is a guess from the names of options, and cautious: a word that may be something else is left
out. docs/spec.md lists the rules.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from slurmtrain.model.experiment.kinds import KeyPath, nearest
from slurmtrain.model.experiment.launcher import PLACEHOLDERS as NODE_PLACEHOLDERS
from slurmtrain.model.experiment.launcher import SHELLS
from slurmtrain.model.experiment.values import SHELL_KEYS, is_secret_variable, texts_in, value_at

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
    places = [*map(_place_of, written), *([_pattern_directory(pattern)] if pattern else ())]
    return list(dict.fromkeys(_in_repository(places, workdir, root)))


def _place_of(named: NamedPath) -> ResultPlace:
    path = PurePosixPath(named.path)
    if _UNKNOWN_NAME in named.path:
        before = next(parent for parent in path.parents if _UNKNOWN_NAME not in str(parent))
        return ResultPlace(str(before), DIRECTORY)
    if path.suffix.lower() in _FILES:
        return ResultPlace(str(path), FILE)
    is_directory = named.path.endswith("/") or _OF_DIRECTORIES.search(named.option)
    return ResultPlace(str(path), DIRECTORY if is_directory else UNKNOWN)


def _pattern_directory(pattern: str) -> ResultPlace:
    """The directory of all files that a pattern matches."""
    parents = PurePosixPath(pattern).parents
    return ResultPlace(str(next(each for each in parents if not _WILDCARD.search(str(each)))), DIRECTORY)


def _in_repository(places: Sequence[ResultPlace], workdir: str, root: str) -> Iterator[ResultPlace]:
    """The relative places below the root or next to it, without the working directory."""
    for place in places:
        if place.path.startswith(("/", "~")):
            continue
        absolute = posixpath.normpath(posixpath.join(workdir, place.path))
        path = posixpath.relpath(absolute, root)
        # Further up, a copy is not surrounded by what surrounds the repository.
        if not path.startswith("../..") and not f"{workdir}/".startswith(f"{absolute.rstrip('/')}/"):
            yield ResultPlace(path, place.kind)


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
        packages = list(_packages_of(statement))
        foreign = [package for package in packages if package not in sys.stdlib_module_names]
        imports += [ScriptImport(package, statement.lineno, certain and package == foreign[0]) for package in foreign]
        certain = certain and not foreign and (bool(packages) or _is_text(statement))
    return imports


def _packages_of(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module.partition(".")[0]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# What commands may have in braces: docs/spec.md.
PLACEHOLDERS = (
    *NODE_PLACEHOLDERS, "resume_from", "resume_dir", "resume_tag", "run_dir", "checkpoint_dir", "run_id", "attempt",
)  # fmt: skip
# Braces as for an interpolation, but without the dollar sign: {params.lr}, or {lr}.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBERS = re.compile(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})+")
# A variable, and words that only a shell understands, outside of quotes.
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_OPERATOR = re.compile(r"&&|\|\|?|;|&|[0-9]?>>?(?:&[0-9])?|<|.*;")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# What only a shell has: no program has these names, or none that does what is meant.
_BUILTINS = frozenset(
    {".", "alias", "cd", "eval", "exec", "export", "module", "pushd", "set", "source", "ulimit", "umask", "unset"}
)
# Variables that exist, or have their values, only in a job or in a rank.
_OF_JOB = re.compile(
    r"(?:SLURM|SLURMD|SLURMTRAIN|CUDA|ROCR|HIP|NCCL|OMPI|PMI|PET)_\w+|TMPDIR|HOSTNAME|RANDOM|RANK|NODE_RANK|GROUP_RANK"
    r"|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|NNODES|NPROC_PER_NODE"
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
            key = next((key for key in keys if _has_key(template, key.split("."))), None)
            if key is not None and name not in PLACEHOLDERS:
                yield (
                    f"nothing replaces {{{name}}}; write ${{{key}}} for the value of that key, or '{{{name}}}', with "
                    "quotes inside of the command, to pass on the braces"
                )


def find_oversights(plain: Mapping[str, Any], variables: Collection[str] = ()) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a spec, as plain data, whose values are hardly meant so, each with a message that says what may be meant.

    ``variables``: names of the variables of this environment.
    """
    for section in ("command", "params", "env", *SHELL_KEYS):
        for path, text in texts_in(plain[section], (section,)):
            for key in dict.fromkeys(_BRACES.findall(text)):
                meant = _meant_by_braces(key, plain, placeholders=section == "command")
                if meant:
                    yield path, f"{{{key}}} is passed on as it is; {meant}"

    def has_now(name: str) -> bool:
        return name in variables and name not in plain["env"] and not is_of_job(name)

    yield from ((("command",), message) for message in _shell_words(plain["command"], has_now))
    for path, text in texts_in(plain["params"], ("params",)):
        if NUMBERS.fullmatch(text):
            name = ".".join(path)
            yield path, f"{text!r} is text; for a run with each number: --sweep {name}={text}; for a list: [{text}]"


def is_of_job(variable: str) -> bool:
    """Whether a variable of this name exists, or has its value, only in a job."""
    return _OF_JOB.fullmatch(variable) is not None


def in_shell(command: str) -> str:
    """A command that lets a shell run this one."""
    return f"bash -c {shlex.quote(command)}"


def of_shell(word: str) -> str:
    """What the first word of a command is, if only a shell can run it; else empty."""
    if word in _BUILTINS:
        return f"{word!r} is no program, but a command of the shell"
    return f"{word!r} sets a variable, which only a shell does" if _ASSIGNMENT.match(word) else ""


def _meant_by_braces(key: str, plain: Mapping[str, Any], *, placeholders: bool) -> str:
    """What a name in braces may stand for, as half a sentence; empty if it can be meant as it is."""
    if placeholders and key in PLACEHOLDERS:
        return ""
    path = key.split(".")
    if len(path) > 1 and _has_key(plain, path):
        return f"${{{key}}} is replaced by the value of that key"
    if placeholders and _has_key(plain, ["params", *path]):
        return f"${{params.{key}}} is replaced by the value of that parameter"
    near = nearest(key, PLACEHOLDERS, _SLIP) if placeholders else None
    return f"did you mean {{{near}}}?" if near else ""


def _words(command: str) -> list[str]:
    """The words of a command with their quotes: what is quoted is meant."""
    try:
        return shlex.split(command, posix=False)
    except ValueError:  # a backslash before a quote, which this mode does not know
        return []


def _shell_words(command: str, has_now: Callable[[str], bool]) -> Iterator[str]:
    """What in a command only a shell would understand; ``has_now``: whether a variable has its value already."""
    words = _outside_shell(_words(command))
    operator = next((word for word in words[1:] if _OPERATOR.fullmatch(word)), None)
    if problem := of_shell(words[0]) if words else "":
        yield f"no shell runs the command: {problem}; write {in_shell(command)}, or a script"
        return
    if operator is not None:
        cure = f"write {in_shell(command)}, or a script"
        yield f"no shell runs the command, and {operator!r} is passed on as it is; {cure}"
        return
    for word in words:
        variable = None if word.startswith("'") else _VARIABLE.search(word)
        if variable is not None:
            name = variable[1]
            yield (
                f"no shell runs the command, and {variable[0]} is passed on as it is; write {in_shell(command)} for "
                "its value in the job"
                + (
                    f", or ${{oc.env:{name}}} for its value now"
                    if not is_secret_variable(name) and has_now(name)
                    else ""
                )
            )
        elif word.startswith("~"):
            home = word.startswith("~/") or word == "~"
            instead = f"${{oc.env:HOME}}{word[1:]}" if home else in_shell(command)
            yield f"no shell runs the command, and {word!r} is passed on as it is; write {instead}"


def _outside_shell(words: Sequence[str]) -> list[str]:
    """The words without the text that a shell runs: ``bash -c "..."``."""
    if not words or words[0].rpartition("/")[2] not in SHELLS:
        return list(words)
    option = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    return [*words[: option + 1], *words[option + 2 :]]


def _has_key(plain: Any, path: Sequence[str]) -> bool:
    return value_at(plain, path, _ABSENT) is not _ABSENT
