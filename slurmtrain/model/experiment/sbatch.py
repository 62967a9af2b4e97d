"""The section `slurm` of a spec: options of sbatch, and the lists of options as they are typed; and the key `log`.

What becomes of each option is in :mod:`slurmtrain.model.experiment.slurm_options`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.experiment.kinds import Entries, Items, KeyPath, Report, Scalar, nearest, suggestion, type_name
from slurmtrain.model.experiment.slurm_options import SLURM_OPTIONS, advice_on
from slurmtrain.model.experiment.values import read_sbatch_value

# sbatch(1), filename pattern: a number before the letter is the width of a zero-padded number.
_PATTERN = re.compile(r"%(\d{0,2})(.?)", re.DOTALL)
LETTERS = "xjAauNnt"
_EXAMPLE = "logs/%x-%j.out"


def check_log(pattern: str) -> None:
    """Raise ValueError unless this is a path that no two jobs have in common, with what is known of a job."""
    if re.search(r"[\x00-\x1f\x7f]", pattern):
        raise ValueError("a control character cannot be used here")
    if "\\" in pattern:
        raise ValueError("Slurm takes what follows a backslash literally, and this does not: leave the backslash out")
    letters = {match[2] for match in _PATTERN.finditer(pattern)}
    strange = sorted(letters - {*LETTERS, "%"})
    if strange:
        letters_here = ", ".join(f"%{letter}" for letter in LETTERS)
        raise ValueError(f"%{strange[0]} stands for nothing here; these do: {letters_here}, and %% is a percent sign")
    if pattern.endswith("/"):
        raise ValueError(f"expected the path of a file, such as {_EXAMPLE}, found {pattern!r}")
    if "j" not in letters and not {"A", "a"} <= letters:
        stem, dot, suffix = pattern.rpartition(".")
        name = f"{stem}-%j.{suffix}" if dot and stem and "/" not in suffix else f"{pattern}-%j"
        raise ValueError(f"{pattern!r} is that of every run, since it lacks the job's id; write {name}")


def fill_log(pattern: str, facts: Mapping[str, str]) -> str:
    """The path that a ``pattern`` stands for; ``facts``: what its letters do."""

    def fill(match: re.Match[str]) -> str:
        fact = "%" if match[2] == "%" else facts[match[2]]
        return fact.zfill(int(match[1])) if match[1] and fact.isdecimal() else fact

    return _PATTERN.sub(fill, pattern)


# The options of all versions: the site's sbatch itself reports the options that it lacks, and lists its plug-ins'
# options.
OPTIONS = frozenset(name for name, option in SLURM_OPTIONS.items() if option.sbatch is not None)
# The options of these that are passed on.
PASSED = frozenset(name for name in OPTIONS if not SLURM_OPTIONS[name].sbatch)
# Keys of ``slurm`` that hold lists of options as they would be typed, which no table of options limits: plug-ins of a
# site, such as pyxis, add options of their own.
SBATCH, SRUN = "sbatch", "srun"
_LISTS = (SBATCH, SRUN)
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_LONG = re.compile(r"--([A-Za-z0-9][\w-]*)(?:=(.*))?", re.ASCII)
_LONG_AND_VALUE = re.compile(r"--([A-Za-z0-9][\w-]*)\s+(\S.*)", re.ASCII)
_SHORT = re.compile(r"-([A-Za-z])\s*(.*)", re.ASCII)
_LETTERS = {
    program: {each.letter: each for each in SLURM_OPTIONS.values() if each.letter and each.advice(program) is not None}
    for program in _LISTS
}
_ALL = "; 'sbatch --help' lists all"
_ELSEWHERE = f"; one that a plug-in of your site adds goes into the list slurm.{SBATCH}: {{0!r}}"
# How similar an option must be to a known one to be a slip beyond doubt, and no option of a plug-in.
_SLIP = 0.85
# Returns the options that the site's own sbatch has, options of plug-ins included; none where there is no sbatch. It is
# given the option that is looked for.
ReadOptions = Callable[[str], frozenset[str]]


def check_sbatch_option(name: object) -> None:
    """Raise ValueError unless this can name an option (``-`` or ``_`` between words)."""
    if not isinstance(name, str):
        raise ValueError(f"expected the long name of an sbatch option, found {type_name(name)} ({name!r})")
    if not _NAME.fullmatch(canonical_option(name)):
        raise ValueError(f"{name!r} cannot name an option of sbatch")


def refused_options(
    slurm: Mapping[str, Any], read_site_options: ReadOptions, nodes: int | None
) -> Iterator[tuple[KeyPath, str]]:
    """Entries of ``slurm`` that are not passed on, by their keys in it, each with a message.

    Only what a user writes is checked: plans of earlier versions, and of other sites, must stay readable.

    Args:
        slurm: The section.
        read_site_options: Called only for options that no version of Slurm has by itself.
        nodes: How many nodes the job has; None: that is not known.
    """
    for entry, value in slurm.items():
        option = canonical_option(entry)
        if entry in _LISTS or value is None or value is False:
            continue
        advice = advice_on(SBATCH, option, value, nodes)
        if advice:
            yield (entry,), f"--{option} is not passed on: {advice}"
        elif advice is None and (unknown := _describe_unknown(option, value, read_site_options)):
            yield (entry,), unknown
    for program in _LISTS:
        for index, typed in enumerate(slurm.get(program) or ()):
            if typed is not None and (problem := _listed_problem(program, typed, nodes)):
                yield (program, str(index)), problem


def _listed_problem(program: str, typed: str, nodes: int | None) -> str:
    """Why an option of the list for a ``program`` is not passed on; empty if it is."""
    name, value = _split(typed)
    option = canonical_option(name)
    advice = advice_on(program, option, value, nodes)
    if advice:
        return f"--{option} is not passed on: {advice}"
    if advice is None and option in SLURM_OPTIONS:
        return f"--{option} is no option of {program}: only {SRUN if program == SBATCH else SBATCH} has it"
    if advice is None:
        # getopt_long(3) takes the beginning of a name for the whole.
        whole = next((each for each in sorted(SLURM_OPTIONS) if each.startswith(option)), None)
        return f"--{name} is no option of {program}: did you mean '--{whole}'?" if whole else ""
    if value is True and SLURM_OPTIONS[option].takes_value == "=":
        return f"--{option} needs a value: write '--{option}=...'"
    return ""


def _describe_unknown(option: str, value: object, read_site_options: ReadOptions) -> str:
    """The message about an option that no version of sbatch has; empty if this site's has it."""
    of_srun = SLURM_OPTIONS.get(option)
    if of_srun is not None:
        typed = f"--{option}" if value is True else f"--{option}={value}"
        cure = of_srun.srun or f"srun has it: write {typed!r} into the list slurm.{SRUN}"
        return f"sbatch has no option --{option}; {cure}"
    if option in _LETTERS[SBATCH]:
        return f"-{option} is the short form; did you mean '{_LETTERS[SBATCH][option].name}'?"
    site = read_site_options(option)
    if option in site:
        return ""
    near = suggestion(option, PASSED | (site - OPTIONS))
    if site:
        return f"this site's sbatch has no option --{option}{near or _ALL}"
    typed = f"--{option}" if value is True else f"--{option}={value}"
    elsewhere = "" if nearest(option, PASSED, _SLIP) is not None else _ELSEWHERE.format(typed)
    return f"sbatch has no option --{option}{near}{elsewhere}"


def unknown_srun_options(slurm: Mapping[str, Any], read_srun_options: ReadOptions) -> Iterator[str]:
    """What is wrong with options in the list ``srun``, as far as this machine's srun can tell.

    ``read_srun_options``: as :data:`ReadOptions`, for srun.
    """
    for option in slurm.get(SRUN) or ():
        name, _ = _split(option)
        if name in SLURM_OPTIONS:
            continue
        site = read_srun_options(name)
        if site and name not in site:
            refused = {each for each, row in SLURM_OPTIONS.items() if row.srun}
            yield f"srun has no option --{name} here{suggestion(name, site - refused)}"


def runs_in_container(slurm: Mapping[str, Any]) -> bool:
    """Whether these options start the tasks in a container, whose files differ from this machine's."""
    return any(
        name.startswith("container") for name in (*named_options(slurm), *named_options({SBATCH: slurm.get(SRUN)}))
    )


def canonical_option(name: str) -> str:
    """The name as sbatch writes it: dashes, no leading ones."""
    return name.replace("_", "-").lstrip("-")


def named_options(slurm: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``slurm`` sets, by the names that sbatch has for them; the value of one without is True."""
    by_name = {
        canonical_option(name): value
        for name, value in slurm.items()
        if name not in _LISTS and value is not None and value is not False
    }
    return by_name | dict(_split(option) for option in slurm.get(SBATCH) or () if option is not None)


def is_singleton(slurm: Mapping[str, Any]) -> bool:
    """Whether only one run of the name may be active at a time (``--dependency=singleton``)."""
    return "singleton" in re.split("[,?]", str(named_options(slurm).get("dependency", "")))


def repeated_options(slurm: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of entries of ``slurm`` that are the same option of sbatch, whose last value would win silently."""
    first: dict[str, str] = {}
    listed = [option for option in slurm.get(SBATCH) or () if option is not None]
    named = [key for key, value in slurm.items() if key not in _LISTS and value is not None and value is not False]
    for entry in (*named, *listed):
        name = _split(entry)[0] if entry.startswith("--") else canonical_option(entry)
        if first.setdefault(name, entry) != entry:
            yield first[name], entry


def _split(option: str) -> tuple[str, str | bool]:
    match = _LONG.fullmatch(option)
    assert match is not None
    return match[1], True if match[2] is None else match[2]


def long_option(program: str, typed: object) -> str:
    """An option as it is typed, also by its letter (``-p spot``, ``-pspot``), with its long name. Raises ValueError.

    ``program``: :data:`SBATCH` or :data:`SRUN`.
    """
    typed = read_sbatch_value(typed)
    text = typed.strip() if isinstance(typed, str) else ""
    if _LONG.fullmatch(text):
        return text
    apart, short = _LONG_AND_VALUE.fullmatch(text), _SHORT.fullmatch(text)
    if apart is not None and apart[1] in SLURM_OPTIONS and SLURM_OPTIONS[apart[1]].takes_value == "=":
        return f"--{apart[1]}={_unquoted(apart[2])}"
    if short is None:
        raise ValueError(
            f"expected an option such as '--container-image=...', '--exclusive' or '-p spot', found {typed!r}"
        )
    option = _LETTERS[program].get(short[1])
    if option is None:
        raise ValueError(f"{program} has no option -{short[1]}")
    # A blank ends an option whose value may be missing (getopt(3)).
    if not short[2]:
        return f"--{option.name}"
    if not option.takes_value or short[2].startswith("="):
        raise ValueError(
            f"{typed!r} is not how {program} has it: write '--{option.name}{'=...' if option.takes_value else ''}'"
        )
    return f"--{option.name}={_unquoted(short[2])}"


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


@dataclass(frozen=True, slots=True)
class SlurmValue:
    """The kind of a value in ``slurm``: an option's or, under :data:`SBATCH` and :data:`SRUN`, a list of options."""

    text: str = "text, number, true or false; under sbatch and srun, a list of options"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if at[-1] not in _LISTS:
            return Scalar(self.text, read_sbatch_value, is_text=True).read(value, at, report)
        items = Items(Scalar("option", lambda typed: long_option(at[-1], typed)), "list of options")
        return () if value is None else items.read(value, at, report)

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return list(value) if isinstance(value, tuple) else value


SLURM_SECTION = Entries(SlurmValue(), "mapping of sbatch options", check_sbatch_option)
