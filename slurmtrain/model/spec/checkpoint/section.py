"""The section ``checkpoint`` of the spec: when to save checkpoints, and which to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.checkpoint.every import Every, EveryAuto, read_every
from slurmtrain.model.spec.checkpoint.formats import AUTO, FORMATS, check_step
from slurmtrain.model.spec.kinds import Conflict, Nullable, NullableSection, Scalar, ShorthandSection, declare_key
from slurmtrain.model.spec.units import parse_size, write_size
from slurmtrain.model.spec.values import POSITIVE

VERIFY = ("hashes", "sizes")
# Keys that have no effect on a script that saves by itself, and what the script does instead.
_UP_TO_THE_SCRIPT = {
    "every": "decides when to save",
    "keep": "deletes what it no longer needs",
    "verify": "verifies what it loads",
    "quota": "limits the space that they take",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSpec:
    """The best checkpoints by a metric, by its last value in `run.log` before the save."""

    metric: str = declare_key("", kinds.text("name of a metric"), "The name of the metric in `run.log`.", required=True)
    mode: str = declare_key(
        "min", kinds.choice("min", "max"), "Whether lower (`min`) or higher (`max`) values are better."
    )
    n: int = declare_key(1, POSITIVE, "How many to keep; of equal ones, the later ones.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """Which checkpoints to keep; all others are deleted after a save. `keep: 3` is short for `keep: {last: 3}`."""

    last: int = declare_key(
        3,
        kinds.whole_number(1, why="a run resumes from its newest checkpoint, which must be kept"),
        "How many of the newest; with 1, there is no fallback if it is damaged.",
    )
    every_steps: int | None = declare_key(
        None,
        Nullable(POSITIVE),
        "Keep the first checkpoint at or after each multiple of this number of steps; null: none.",
    )
    best: BestSpec | None = declare_key(
        None, NullableSection(BestSpec), "The best checkpoints by a metric; null: none."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When to save checkpoints, and which to keep."""

    every: Every = declare_key(
        EveryAuto(),
        Scalar("`auto`, `{steps: N}` or `{minutes: N}`", read_every, lambda every: every.to_dict()),
        "When `slurmtrain.session()` saves; auto weighs the cost of a save against the work at risk.",
    )
    keep: KeepSpec = declare_key(
        KeepSpec(),
        ShorthandSection(KeepSpec, "last"),
        "Which checkpoints to keep; a number N: the newest N.",
    )
    verify: str = declare_key(
        "hashes",
        kinds.choice(*VERIFY),
        "How a checkpoint's files are verified before a run resumes from it; `sizes` reads no file.",
    )
    quota: int | None = declare_key(
        None,
        Nullable(Scalar("amount with a unit, such as `100GB`", parse_size, write_size)),
        "Disk space for the checkpoints of the run, in units of 1024. Before a save that would exceed it, checkpoints "
        "that `keep` does not cover are deleted; if that is not enough, there is a warning. null: no limit.",
    )
    glob: str | None = declare_key(
        None,
        Nullable(kinds.text("pattern of file names")),
        "Where a script that saves by itself puts its checkpoints, relative to `workdir`; the next attempt gets the "
        "newest complete one as `{resume_from}` and SLURMTRAIN_RESUME_FROM.",
    )
    format: str = declare_key(
        AUTO,
        kinds.choice(*FORMATS),
        "The format of what `glob` matches, which decides what is complete; auto recognizes it. With `own` the script "
        "finds its checkpoints itself, and none is passed to it.",
    )
    step: str | None = declare_key(
        None,
        Nullable(kinds.text("regular expression, or key", check_step)),
        "A regular expression whose one group, or group `step`, is the step in the path of what `glob` matches; or the "
        "key of the step inside the checkpoint, such as `iter_num` or `trainer.step`. null: the step inside the "
        "checkpoint under a usual name, else in its name.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        # A default never contradicts anything, written out or not: plans contain all defaults.
        untouched = CheckpointSpec()
        if not self.glob:
            for key in ("format", "step"):
                if getattr(self, key) != getattr(untouched, key):
                    yield key, f"{key!r} needs 'glob', which says where the script leaves its checkpoints"
            return
        for key, does in _UP_TO_THE_SCRIPT.items():
            if getattr(self, key) != getattr(untouched, key):
                yield "glob", f"'glob' and {key!r} exclude each other: with 'glob' your own script {does}"
