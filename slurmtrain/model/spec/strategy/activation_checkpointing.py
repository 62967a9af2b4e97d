"""The key `strategy.activation_checkpointing`: which activations are computed again instead of being kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Items, ShorthandSection, declare_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """Modules whose activations are not kept for the backward pass, which computes them again."""

    wrap: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("name of a class"), "list of classes"),
        "The classes of these modules, such as `[Block]`; if empty, those elements of the model's module lists and "
        "sequences that consist of modules themselves.",
    )
    save: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("name of an operator"), "list of operators"),
        "Operators of torch whose results are kept nevertheless, such as `[mm, addmm]`: those that take long.",
    )


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingSection(ShorthandSection):
    """The section, which may be written as true or as a list of classes, or be false or null."""

    cls: type = ActivationCheckpointing
    key: str = "wrap"

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "true, list of classes, section, or null"

    def expand(self, value: object) -> object:
        """The mapping that a single ``value`` stands for; anything else unchanged."""
        if value is True:
            return {}
        return {self.key: value} if value is not None and not isinstance(value, Mapping) else value

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> ActivationCheckpointing | None:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None or value is False:
            return None
        spec: ActivationCheckpointing = ShorthandSection.read(self, value, at, report)
        return spec

    def write(self, value: ActivationCheckpointing | None) -> object:
        """As :meth:`Kind.write`."""
        return None if value is None else ShorthandSection.write(self, value)
