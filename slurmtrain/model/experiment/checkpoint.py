"""The sections `checkpoint` and `start_from` of a spec: when to save, what to keep, what scripts save themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.launcher import split_command
from slurmtrain.model.experiment.values import compile_pattern, parse_size, write_size


@dataclass(frozen=True, slots=True)
class Every:
    """When to save, ``checkpoint.every``: each so many ``steps`` or ``minutes``.

    With neither (``auto``), as often as is worthwhile: the cost of a save is weighed against the work at risk.
    """

    steps: int | None = None
    minutes: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the cost of saves decides."""
        return self.steps is None and self.minutes is None

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return "auto" if self.is_auto else {name: each for name, each in asdict(self).items() if each is not None}

    def is_due(self, step: int, *, since_save_s: float, optimum_s: float) -> bool:
        """Whether to save now.

        Args:
            step: Finished steps.
            since_save_s: Seconds since the last save began, or since training did.
            optimum_s: The interval in seconds between saves that loses the least time.
        """
        if self.steps is not None:
            return step > 0 and step % self.steps == 0
        return since_save_s >= (optimum_s if self.minutes is None else self.minutes * 60)

    def next_step(self, step: int) -> int | None:
        """The first step after ``step`` that is saved regardless of the clock; None if there is none."""
        return None if self.steps is None else step - step % self.steps + self.steps


def read_every(value: object) -> Every:
    """``checkpoint.every``: ``auto``, ``{steps: N}`` or ``{minutes: N}``. Raises ValueError."""
    if value == "auto":
        return Every()
    if not isinstance(value, dict):
        raise ValueError(f"expected auto, {{steps: N}} or {{minutes: N}}, found {value!r}")
    if set(value) == {"steps", "minutes"}:
        raise ValueError("'steps' and 'minutes' exclude each other; keep one of them")
    if len(value) != 1 or next(iter(value)) not in ("steps", "minutes"):
        near = next((kinds.nearest(str(key), ("steps", "minutes")) for key in value), None)
        amount = next((each for each in value.values() if isinstance(each, int) and each > 0), 10)
        cure = f"; write {{{near}: {amount}}}" if near else ""
        raise ValueError(f"expected {{steps: N}} or {{minutes: N}}, found {value!r}{cure}")
    ((unit, amount),) = value.items()
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
        raise ValueError(f"expected a number of {unit} above zero, found {amount!r}")
    if unit == "steps" and not isinstance(amount, int):
        raise ValueError(f"expected a whole number of steps, found {amount!r}")
    return Every(steps=amount) if isinstance(amount, int) and unit == "steps" else Every(minutes=amount)


AUTO = "auto"
"""The format is recognized from the content."""
OWN = "own"
"""The script finds its checkpoints itself, and slurmtrain passes it none."""
FORMATS = (AUTO, "torch", "safetensors", "dcp", "hf", "lightning", "accelerate", "deepspeed", OWN)


# A key inside a checkpoint, such as `iter_num` or `trainer.global_step`: no regular expression that finds digits.
_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
# The group that is the step, where there are several.
_STEP = "step"


def step_key(text: str | None) -> Sequence[str] | None:
    """The names of the key inside a checkpoint that ``checkpoint.step`` is; None if it is a regular expression."""
    return text.split(".") if text is not None and _KEY.fullmatch(text) else None


def check_step(text: str) -> None:
    """Check that ``text`` is a key, or a regular expression with a group for the step. Raises ValueError."""
    if step_key(text) is not None:
        return
    pattern = compile_pattern(text)
    if pattern.groups != 1 and _STEP not in pattern.groupindex:
        raise ValueError(
            rf"{text!r} has {pattern.groups} groups; it must have one group for the digits of the step, as in "
            r"'step=(\d+)', or a group of that name, as in '(\d+)-(?P<step>\d+)'; a key inside the checkpoint is "
            "written as 'iter_num'"
        )


def step_by_pattern(pattern: str, path: str) -> int | None:
    """The step in a checkpoint's ``path`` according to ``checkpoint.step``; None if it does not match."""
    match = re.search(pattern, path)
    if match is None:
        return None
    digits = match[_STEP if _STEP in match.re.groupindex else 1]
    # A group that took no part in the match is None.
    return int(digits) if digits is not None and digits.isdecimal() else None


# Words that say that the number after them is a step, the most specific first: `global_step100`, `step=30`,
# `iter_0000100`, `checkpoint-500`. Such a word is not part of a longer one, nor the number part of a decimal.
_MARKED = [
    re.compile(rf"(?<![a-z])(?:{words})[=_\-:]?(\d+)(?!\d|\.\d)", re.IGNORECASE)
    for words in ("global[_-]?steps?", "steps?|it|iters?|iterations?", "ckpt|chkpt|checkpoint")
]
# Numbers that count or measure something else.
_OTHER = re.compile(
    r"[a-z_]+=-?[\d.]+(?:e[+-]?\d+)?|(?<![a-z])(?:epochs?|ep|seed|v|version|rank|part)[=_\-]?\d+", re.IGNORECASE
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+", re.IGNORECASE)
# Not attached to letters, as in `resnet50` or `fp16`.
_ALONE = re.compile(r"(?<![a-z\d])\d+(?![a-z\d])", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_ENDING = re.compile(r"\.[a-z]\w*$", re.IGNORECASE)


def step_in_name(name: str) -> int | None:
    """The step that the ``name`` of a file or directory holds; None if it holds none.

    A number after a word for steps counts most, then one after a word for checkpoints, then the last whole number that
    stands alone. Numbers of epochs and metrics are no steps.
    """
    stem = _ENDING.sub("", name)
    marked = next(filter(None, (pattern.findall(stem) for pattern in _MARKED)), None)
    numbers = marked or _ALONE.findall(_DECIMAL.sub("", _OTHER.sub("", stem)))
    return int(numbers[-1]) if numbers else None


def last_number(name: str) -> int | None:
    """The last whole number of a name, whatever it counts: the names that one script chooses sort by it."""
    numbers = _NUMBER.findall(_DECIMAL.sub("", _ENDING.sub("", name)))
    return int(numbers[-1]) if numbers else None


OF_CHECKPOINT = ("resume_from", "resume_dir", "resume_tag")
"""The placeholders for the checkpoint to continue from."""
CONDITIONAL = re.compile(rf"\{{({'|'.join(OF_CHECKPOINT)})\?((?:[^{{}}]|\{{\w+\}})*)\}}")
"""The name of a placeholder, and the text, which may have placeholders itself."""


WHOLE, WEIGHTS = "everything", "weights"
BEST = "best"
# A run, and which of its checkpoints.
_WORDS = re.compile(r"(?P<run>[^:\s]+)(?::(?P<step>[^:\s]+))?")


_check_run = kinds.matching(r"[^:\s]*", "{!r} is not RUN, RUN:STEP or RUN:best")


def _read_step(value: object) -> int | str:
    """A step, or the word for the best one. Raises ValueError."""
    # From the short form RUN:STEP it comes as text.
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value == BEST or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("a step is a positive whole number, or `best`")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFromSpec:
    """The checkpoint of another run that a run begins with. `start_from: RUN:STEP` is short for its keys."""

    run: Annotated[str, kinds.text("run", _check_run), kinds.REQUIRED] = ""
    """The run: its id, the beginning of it, or its name."""
    step: Annotated[int | str, kinds.Scalar("step, or `best`", _read_step)] | None = None
    """The step of the checkpoint; `best`: the best one by the run's `checkpoint.keep.best`. null: the newest."""
    load: Annotated[str, kinds.choice(WHOLE, WEIGHTS)] = WHOLE
    """`everything`: the run continues from the checkpoint. `weights`: it begins at step 0, with the weights of the
    checkpoint's modules."""

    @staticmethod
    def expand(value: object) -> object:
        """The keys that `RUN`, `RUN:STEP` or `RUN:best` stands for; another ``value`` unchanged."""
        # An id of digits only is a number to YAML.
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        match = _WORDS.fullmatch(str(value))
        return match.groupdict() if match else {"run": str(value)}

    def __str__(self) -> str:
        """The run and the step, as on a command line."""
        return self.run if self.step is None else f"{self.run}:{self.step}"


VERIFY = ("hashes", "sizes")
# Keys that have no effect on a script that saves by itself, and what the script does instead.
_UP_TO_THE_SCRIPT = {
    "every": "decides when to save",
    "keep": "deletes files that it no longer needs",
    "verify": "verifies checkpoints that it loads",
    "quota": "limits the space that they take",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSpec:
    """The best checkpoints by a metric, by its last value in `run.log` before the save."""

    metric: Annotated[str, kinds.text("name of a metric"), kinds.REQUIRED] = ""
    """The name of the metric in `run.log`."""
    mode: Annotated[str, kinds.choice("min", "max")] = "min"
    """Whether lower (`min`) or higher (`max`) values are better."""
    n: kinds.Positive = 1
    """How many to keep; of equal ones, the later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """Which checkpoints to keep; all others are deleted after a save. `keep: 3` is short for `keep: {last: 3}`."""

    SHORTHAND: ClassVar = "last"
    last: Annotated[int, kinds.whole_number(1, why="a run resumes from its newest checkpoint: keep one")] = 3
    """How many of the newest to keep; with 1, there is no fallback if it is damaged."""
    every_steps: kinds.Positive | None = None
    """Keep the first checkpoint at or after each multiple of this number of steps; null: none."""
    best: BestSpec | None = None
    """The best checkpoints by a metric; null: none."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A published checkpoint: the finished steps, and the latest metrics when it was saved (None: not a number)."""

    step: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def reasons_to_keep(saved: Sequence[Saved], keep: KeepSpec) -> dict[int, str]:
    """Why each kept checkpoint is kept, by step, the oldest first. The newest is always kept.

    ``saved``: all complete checkpoints, in any order, each step once.
    """
    ordered = sorted(saved, key=lambda checkpoint: checkpoint.step)
    why: dict[int, list[str]] = {checkpoint.step: [] for checkpoint in ordered}
    # At least 1, since a slice from -0 on has all of them.
    for checkpoint in ordered[-max(1, keep.last) :]:
        why[checkpoint.step].append("newest" if checkpoint is ordered[-1] else f"one of the last {keep.last}")
    if keep.every_steps is not None:
        # The first at or after each multiple: saves at time intervals hit a multiple only by chance.
        firsts: dict[int, int] = {}
        for checkpoint in ordered:
            firsts.setdefault(checkpoint.step // keep.every_steps, checkpoint.step)
        for step in (step for multiple, step in firsts.items() if multiple > 0):
            why[step].append(f"every {keep.every_steps} steps")
    if keep.best is not None:
        count = f"best {keep.best.n} of" if keep.best.n > 1 else "best"
        for step, value in best_steps(ordered, keep.best).items():
            why[step].append(f"{count} {keep.best.metric} ({value:.4g})")
    return {step: ", ".join(rules) for step, rules in why.items() if rules}


def disposable_steps(saved: Sequence[Saved], keep: KeepSpec) -> list[int]:
    """The steps of the checkpoints that may be deleted, oldest first."""
    staying = reasons_to_keep(saved, keep)
    return sorted(checkpoint.step for checkpoint in saved if checkpoint.step not in staying)


def best_steps(ordered: Sequence[Saved], best: BestSpec) -> dict[int, float]:
    """The steps with the best values of a metric that are numbers, the best first; of equal values the later step wins.

    Args:
        ordered: Checkpoints, each step once.
        best: The metric, whether larger values are better, and how many steps.
    """
    candidates = ((saved.step, saved.metrics.get(best.metric)) for saved in ordered)
    # Neither NaN, nor infinite, nor too large for a float.
    values = {
        step: float(value)
        for step, value in candidates
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(values, key=lambda step: (sign * values[step], -step))
    return {step: values[step] for step in ranked[: best.n]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When to save checkpoints, and which to keep."""

    every: Annotated[
        Every, kinds.Scalar("`auto`, `{steps: N}` or `{minutes: N}`", read_every, lambda every: every.to_dict())
    ] = Every()
    """When `slurmtrain.session()` saves; auto weighs the cost of a save against the work at risk."""
    keep: KeepSpec = KeepSpec()
    """Which checkpoints to keep; a number N: the newest N."""
    verify: Annotated[str, kinds.choice(*VERIFY)] = "hashes"
    """How a checkpoint's files are verified before a run resumes from it; `sizes` reads no file."""
    quota: Annotated[int, kinds.Scalar("amount with a unit, such as `100GB`", parse_size, write_size)] | None = None
    """Disk space for the checkpoints of the run, in units of 1024. A save that would exceed it first deletes
    checkpoints that `keep` does not cover; if that is not enough, it warns. null: no limit."""
    glob: Annotated[str, kinds.text("pattern of file names")] | None = None
    """Where a script that saves on its own writes its checkpoints, relative to `workdir`; the next attempt gets the
    newest complete one as `{resume_from}` and SLURMTRAIN_RESUME_FROM."""
    format: Annotated[str, kinds.choice(*FORMATS)] = AUTO
    """The format of the checkpoints that `glob` matches; it decides which are complete. auto recognizes it. With `own`
    the script finds its checkpoints itself, and slurmtrain passes it none."""
    step: Annotated[str, kinds.text("regular expression, or key", check_step)] | None = None
    """Where to find the step of a checkpoint: a regular expression whose one group, or group `step`, matches it in the
    path; or its key inside the checkpoint, such as `iter_num` or `trainer.step`. null: inside the checkpoint under a
    usual name, else in its path."""

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        # A default never contradicts anything, written out or not: plans contain all defaults.
        untouched = CheckpointSpec()
        if not self.glob:
            for key in ("format", "step"):
                if getattr(self, key) != getattr(untouched, key):
                    yield key, f"{key!r} needs 'glob', the pattern of the script's checkpoints"
            return
        for key, does in _UP_TO_THE_SCRIPT.items():
            if getattr(self, key) != getattr(untouched, key):
                yield "glob", f"'glob' and {key!r} exclude each other: with 'glob' your own script {does}"


def placeholder_problems(command: str, checkpoint: CheckpointSpec) -> Iterator[str]:
    """Why placeholders of a ``command`` for a checkpoint cannot be filled in, as sentences without a full stop."""
    for word in split_command(command):
        for name in re.findall(r"\{([A-Za-z_]\w*)\?", CONDITIONAL.sub("", word)):
            if name in OF_CHECKPOINT:
                yield f"'{{{name}?...' does not end in the same argument: with blanks, write it in quotes as a whole"
            elif near := kinds.suggestion(name, OF_CHECKPOINT):
                yield f"'{{{name}?...}}' is not a placeholder{near}"
    for name in OF_CHECKPOINT:
        if not re.search(rf"\{{{name}[?}}]", command):
            continue
        if not checkpoint.glob:
            yield f"'{{{name}}}' needs to know where checkpoints are: set 'checkpoint.glob'"
        elif checkpoint.format == OWN:
            yield f"'{{{name}}}' is always empty with 'checkpoint.format: own'; remove one of the two"
