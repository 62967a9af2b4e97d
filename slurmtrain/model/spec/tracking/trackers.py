"""The sections of ``tracking`` that choose trackers other than MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import KeyPath, Nullable, Report, declare_key
from slurmtrain.model.spec.names import check_param_name
from slurmtrain.model.spec.values import ParamKind

_OWN = ("mlflow", "wandb", "tensorboard", "csv")
WANDB_MODES = ("auto", "online", "offline")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSpec:
    """Showing runs in Weights & Biases."""

    enabled: bool = declare_key(False, kinds.boolean(), "Whether `sync` sends this run to Weights & Biases.")
    project: str | None = declare_key(None, Nullable(kinds.text("name")), "Its project; null: MLflow's experiment.")
    entity: str | None = declare_key(None, Nullable(kinds.text("name")), "Its user or team; null: the default one.")
    mode: str = declare_key(
        "auto",
        kinds.choice(*WANDB_MODES),
        "`offline` writes directories for `wandb sync`; `online` sends to the server; auto: online if an API key is "
        "there.",
    )
    dir: str | None = declare_key(
        None, Nullable(kinds.text("directory")), "Where it writes the folder `wandb`; null: the runs root."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardSpec:
    """Showing runs in TensorBoard."""

    enabled: bool = declare_key(False, kinds.boolean(), "Whether `sync` writes event files of this run.")
    dir: str | None = declare_key(
        None,
        Nullable(kinds.text("directory")),
        "Directory with a folder for each run; null: `tensorboard` in the runs root.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSpec:
    """Writing metrics to CSV files."""

    enabled: bool = declare_key(False, kinds.boolean(), "Whether `sync` writes a CSV file of this run.")
    dir: str | None = declare_key(
        None, Nullable(kinds.text("directory")), "Directory with a file for each run; null: `csv` in the runs root."
    )


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
            report(at, f"expected a {self.text}, found {kinds.type_name(value)} ({value!r})")
            return {}
        return dict(ParamKind().read(dict(value or {}), at, report))

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return value


def tracker_settings(tracking: Any) -> dict[str, dict[str, Any]]:
    """The settings of the trackers that are switched on in the section ``tracking``, by name."""
    own = {name: getattr(tracking, name) for name in _OWN}
    settings = {
        name: {f.name: getattr(section, f.name) for f in fields(section) if f.name != "enabled"}
        for name, section in own.items()
        if section.enabled
    }
    return {**settings, **{name: dict(each) for name, each in tracking.plugins.items()}}
