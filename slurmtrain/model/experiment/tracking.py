"""The section `tracking` of a spec: trackers, and where the metrics of scripts are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.values import (
    ParamKind,
    check_experiment_name,
    check_param_name,
    compile_pattern,
)
from slurmtrain.model.urls import check_tracking_uri

_OWN = ("mlflow", "wandb", "tensorboard", "csv")
WANDB_MODES = ("auto", "online", "offline")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSpec:
    """Showing runs in Weights & Biases."""

    enabled: bool = False
    """Whether `sync` sends this run to Weights & Biases."""
    project: Annotated[str, kinds.text("name")] | None = None
    """Its project; null: MLflow's experiment."""
    entity: Annotated[str, kinds.text("name")] | None = None
    """Its user or team; null: the default one."""
    mode: Annotated[str, kinds.choice(*WANDB_MODES)] = "auto"
    """`offline` writes directories for `wandb sync`; `online` sends to the server; auto: online if an API key is
    there."""
    dir: Annotated[str, kinds.text("directory")] | None = None
    """The directory for its folder `wandb`; null: the runs root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardSpec:
    """Showing runs in TensorBoard."""

    enabled: bool = False
    """Whether `sync` writes event files of this run."""
    dir: Annotated[str, kinds.text("directory")] | None = None
    """Directory with a folder for each run; null: `tensorboard` in the runs root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSpec:
    """Writing metrics to CSV files."""

    enabled: bool = False
    """Whether `sync` writes a CSV file of this run."""
    dir: Annotated[str, kinds.text("directory")] | None = None
    """Directory with a file for each run; null: `csv` in the runs root."""


def check_plugin_name(name: str) -> None:
    """Raise ValueError unless this can name a tracker of another package."""
    check_param_name(name, "tracker")
    if name in _OWN:
        raise ValueError(f"{name} is built into slurmtrain: write its settings under 'tracking.{name}'")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The kind of the settings of a third-party tracker: a mapping like ``params``, or null."""

    text = "mapping of settings, or null"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> dict[str, Any]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is not None and not isinstance(value, Mapping):
            report(at, str(kinds.expected(f"a {self.text}", value)))
            return {}
        # Like parameters, since they are recorded too: secrets are refused.
        return dict(ParamKind().read(dict(value or {}), at, report))

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return value


# Groups of a pattern that are no metrics.
STEP, TOTAL = "step", "total"
CSV_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".ndjson")
_SUFFIXES = (*CSV_SUFFIXES, *JSON_SUFFIXES)


_check_file = kinds.matching(
    rf"(?is).*(?:{'|'.join(map(re.escape, _SUFFIXES))})",
    f"expected a file that ends in {', '.join(_SUFFIXES)}, found {{!r}}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptMetricsSpec:
    """Where to read the metrics of a script that does not call slurmtrain: rank 0's log, or a file that grows."""

    WORDS: ClassVar = ("off", "auto")

    @staticmethod
    def expand(value: object) -> object:
        """The section that `off` or false stands for, and None for `auto` or true; another ``value`` unchanged."""
        if value == "auto" or value is True:
            return None
        return dict.fromkeys(("pattern", "file")) if value == "off" or value is False else value

    pattern: Annotated[str, kinds.text("regular expression", compile_pattern)] | None = None
    r"""A regular expression that is searched for in each line of rank 0's log, with a named group for each metric, such
    as `loss=(?P<loss>\S+)`. The groups `step` and `total` are not metrics: they are the number of finished steps, and
    of all steps; `step` alone is enough."""
    file: Annotated[str, kinds.text("path", _check_file)] | None = None
    """A file that the script appends a line to for each step: `.csv` or `.tsv` with a header, or `.jsonl`; relative to
    `workdir`, and may contain `{run_dir}` and `{checkpoint_dir}`. Its columns are the metrics."""
    step: Annotated[str, kinds.text("regular expression, or column")] | None = None
    """With `pattern`: a regular expression whose one group is the number of finished steps, in the same lines or in
    others. With `file`: the column with that number. null: the group or column `step`, else the number of lines with
    metrics."""
    total: kinds.Positive | None = None
    """How many steps there will be; null: the group `total`, else unknown."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is read."""
        return self.pattern is None and self.file is None

    @property
    def may_count(self) -> bool:
        """Whether steps may be the number of lines with metrics, since none of the keys says what else they are."""
        return self.step is None and (self.pattern is None or STEP not in re.compile(self.pattern).groupindex)

    @staticmethod
    def require(written: Mapping[str, Any]) -> None:
        """Raise ValueError unless it is ``written`` what is read: not a conflict, since a mistake there is enough."""
        is_off = {"pattern", "file"} <= written.keys() and not any(value is not None for value in written.values())
        if written.get("pattern") is None and written.get("file") is None and not is_off:
            raise ValueError(r"set 'pattern', such as 'loss=(?P<loss>\S+)', or 'file', such as '{run_dir}/metrics.csv'")

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        if self.pattern is not None and self.file is not None:
            yield "file", "'file' and 'pattern' exclude each other: metrics are read either from a file or from the log"
        # If both are missing, require() has reported it.
        if self.file is not None or self.pattern is None:
            return
        groups = re.compile(self.pattern).groupindex
        if not groups.keys() - {TOTAL}:
            example = r"'step (?P<step>\d+)' or 'loss=(?P<loss>\S+)'"
            yield "pattern", f"it names neither a metric nor a step: give each a named group, such as {example}"
        if self.step is not None:
            if STEP in groups:
                yield "step", "'pattern' has a group 'step' already"
            try:
                pattern = compile_pattern(self.step)
            except ValueError as error:
                yield "step", str(error)
                return
            if pattern.groups != 1 and STEP not in pattern.groupindex:
                yield "step", rf"expected one group, the number of finished steps, such as 'step (\d+)': {self.step!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSpec:
    """Sending metrics to MLflow."""

    enabled: bool = True
    """Whether `sync` mirrors this run to MLflow."""
    uri: Annotated[str, kinds.text("URI", check_tracking_uri)] | None = None
    """MLflow tracking URI; null: the configured one, else mlflow.db in the runs root."""
    experiment: Annotated[str, kinds.text("name", check_experiment_name)] | None = None
    """MLflow experiment; null: the name of the spec's file or, if that says little, such as `train`, the name of its
    directory."""


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
        dict[str, dict[str, Any]],
        kinds.Entries(PluginSettings(), "mapping of trackers to their settings", check_plugin_name),
    ] = field(default_factory=dict)
    """Trackers of other packages, by name, with settings of their own."""
    live: bool = False
    """Whether trackers that cannot delete points also show points that a rollback may still reach, as `live/NAME`."""
    metrics: ScriptMetricsSpec | None = None
    """Where to read step and metrics of a script that does not report them itself. null or `auto`: guess them from its
    output; `off`: do not read them."""
    system_metrics: bool = True
    """Whether each node records the load and memory of its processors and GPUs."""

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
