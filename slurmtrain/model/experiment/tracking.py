"""The section `tracking` of a spec: trackers, and where the metrics of a script stand that does not report them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from slurmtrain.model.experiment.kinds import Conflict, Entries, KeyPath, Positive, Report, choice, expected, text
from slurmtrain.model.experiment.values import ParamKind, check_experiment_name, check_param_name
from slurmtrain.model.passwords import check_tracking_uri

_OWN = ("mlflow", "wandb", "tensorboard", "csv")
WANDB_MODES = ("auto", "online", "offline")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSpec:
    """Showing runs in Weights & Biases."""

    enabled: bool = False
    """Whether `sync` sends this run to Weights & Biases."""
    project: Annotated[str, text("name")] | None = None
    """Its project; null: MLflow's experiment."""
    entity: Annotated[str, text("name")] | None = None
    """Its user or team; null: the default one."""
    mode: Annotated[str, choice(*WANDB_MODES)] = "auto"
    """`offline` writes directories for `wandb sync`; `online` sends to the server; auto: online if an API key is
    there."""
    dir: Annotated[str, text("directory")] | None = None
    """Where it writes the folder `wandb`; null: the runs root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardSpec:
    """Showing runs in TensorBoard."""

    enabled: bool = False
    """Whether `sync` writes event files of this run."""
    dir: Annotated[str, text("directory")] | None = None
    """Directory with a folder for each run; null: `tensorboard` in the runs root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSpec:
    """Writing metrics to CSV files."""

    enabled: bool = False
    """Whether `sync` writes a CSV file of this run."""
    dir: Annotated[str, text("directory")] | None = None
    """Directory with a file for each run; null: `csv` in the runs root."""


def check_plugin_name(name: str) -> None:
    """Raise ValueError unless this can name a tracker of another package."""
    check_param_name(name, "tracker")
    if name in _OWN:
        raise ValueError(f"{name} is slurmtrain's own tracker: its settings are those of 'tracking.{name}'")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The kind of the settings of a third-party tracker: a mapping like ``params``, or null."""

    text = "mapping of settings, or null"

    def read(self, value: object, at: KeyPath, report: Report) -> dict[str, Any]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is not None and not isinstance(value, Mapping):
            report(at, str(expected(f"a {self.text}", value)))
            return {}
        return dict(ParamKind().read(dict(value or {}), at, report))

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return value


# Groups of a pattern that are no metrics.
STEP, TOTAL = "step", "total"
CSV_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".ndjson")
_SUFFIXES = (*CSV_SUFFIXES, *JSON_SUFFIXES)


def _check_pattern(text: str) -> None:
    """Raise ValueError unless ``text`` is a regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None


def _check_file(text: str) -> None:
    """Raise ValueError unless the name of the file tells its format."""
    if not text.lower().endswith(_SUFFIXES):
        raise ValueError(f"expected a file that ends in {', '.join(_SUFFIXES)}, found {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMetricsSpec:
    """The metrics of a script that does not call slurmtrain: in the log of rank 0, or in a file that grows."""

    pattern: Annotated[str, text("regular expression", _check_pattern)] | None = None
    r"""A regular expression with a named group for each metric, such as `loss=(?P<loss>\S+)`, which is searched for in
    each line of rank 0's log. The groups `step` and `total` are no metrics: they are the finished steps, and how many
    there will be; `step` alone is enough."""
    file: Annotated[str, text("path", _check_file)] | None = None
    """A file to which the script appends a line for each step: `.csv` or `.tsv` with a header, or `.jsonl`; relative to
    `workdir`; `{run_dir}` and `{checkpoint_dir}` are filled in. Its columns are the metrics."""
    step: Annotated[str, text("regular expression, or column")] | None = None
    """With `pattern`: a regular expression whose one group is the number of finished steps, in the same lines or in
    others. With `file`: the column with that number. null: the group or column `step`, else lines with metrics are
    counted."""
    total: Positive | None = None
    """How many steps there will be; null: the group `total`, else unknown."""

    @property
    def may_count(self) -> bool:
        """Whether steps may be the number of lines with metrics, since none of the keys says what else they are."""
        return self.step is None and (self.pattern is None or STEP not in re.compile(self.pattern).groupindex)

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless it is ``written`` what is read: not a conflict, since a mistake there is enough."""
        if written.get("pattern") is None and written.get("file") is None:
            raise ValueError(r"set 'pattern', such as 'loss=(?P<loss>\S+)', or 'file', such as '{run_dir}/metrics.csv'")

    def conflicts(self) -> Iterator[Conflict]:
        """Keys that contradict each other, and why."""
        if self.pattern is not None and self.file is not None:
            yield "file", "'file' and 'pattern' exclude each other: metrics are read either from a file or from the log"
        elif self.pattern is not None:
            yield from self._conflicts_of_patterns(set(re.compile(self.pattern).groupindex))

    def _conflicts_of_patterns(self, groups: set[str]) -> Iterator[Conflict]:
        if not groups - {TOTAL}:
            yield (
                "pattern",
                r"it names no metric and no step: give each a named group, such as 'step (?P<step>\d+)' or "
                r"'loss=(?P<loss>\S+)'",
            )
        if self.step is None:
            return
        if STEP in groups:
            yield "step", "'pattern' has a group 'step' already"
        try:
            pattern = re.compile(self.step)
        except (re.error, RecursionError, OverflowError) as error:
            yield "step", f"{self.step!r} is not a regular expression: {error}"
            return
        if pattern.groups != 1 and STEP not in pattern.groupindex:
            yield "step", rf"expected one group, the number of finished steps, such as 'step (\d+)': {self.step!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSpec:
    """Mirroring metrics to MLflow."""

    enabled: bool = True
    """Whether `sync` mirrors this run to MLflow."""
    uri: Annotated[str, text("URI", check_tracking_uri)] | None = None
    """MLflow tracking URI; null: the configured one, else mlflow.db in the runs root."""
    experiment: Annotated[str, text("name", check_experiment_name)] | None = None
    """MLflow experiment; null: the name of the spec's file or, where that says little, as `train` does, its
    directory's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSpec:
    """Experiment tracking."""

    mlflow: MlflowSpec = MlflowSpec()
    """MLflow."""
    wandb: WandbSpec = WandbSpec()
    """Weights & Biases."""
    tensorboard: TensorboardSpec = TensorboardSpec()
    """TensorBoard."""
    csv: CsvSpec = CsvSpec()
    """CSV files."""
    plugins: Annotated[
        dict[str, dict[str, Any]], Entries(PluginSettings(), "mapping of trackers to their settings", check_plugin_name)
    ] = field(default_factory=dict)
    """Trackers of other packages, by name, with settings of their own."""
    live: bool = False
    """Whether trackers that cannot delete points also show points that a rollback may still reach, as `live/NAME`."""
    metrics: ScriptMetricsSpec | None = None
    """Where step and metrics of a script stand that does not report them itself; null: it does."""
    system_metrics: bool = True
    """Whether each node measures how busy its processors and GPUs are, and their memory."""

    @property
    def trackers(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of the trackers that are switched on, by name."""
        own = {name: getattr(self, name) for name in _OWN}
        settings = {
            name: {f.name: getattr(section, f.name) for f in fields(section) if f.name != "enabled"}
            for name, section in own.items()
            if section.enabled
        }
        return {**settings, **{name: dict(each) for name, each in self.plugins.items()}}
