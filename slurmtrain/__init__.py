"""slurmtrain: from one YAML file to a finished training run, through every preemption.

Importing this package loads neither torch nor sqlalchemy: what scripts use is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from slurmtrain.version import __version__

__all__ = ["Registry", "RunHandle", "__version__", "leave", "log", "pause", "progress", "session", "stop_requested"]

if TYPE_CHECKING:
    from slurmtrain.api.registry import Registry
    from slurmtrain.api.run_handle import RunHandle
    from slurmtrain.runtime.training.loop import leave, log, pause, progress, stop_requested
    from slurmtrain.runtime.training.session import session

_MODULES = {
    "Registry": "slurmtrain.api.registry",
    "RunHandle": "slurmtrain.api.run_handle",
    "leave": "slurmtrain.runtime.training.loop",
    "log": "slurmtrain.runtime.training.loop",
    "pause": "slurmtrain.runtime.training.loop",
    "progress": "slurmtrain.runtime.training.loop",
    "session": "slurmtrain.runtime.training.session",
    "stop_requested": "slurmtrain.runtime.training.loop",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from slurmtrain.system.interpreter import without_collection

        with without_collection():
            function: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = function
        return function
    raise AttributeError(f"module 'slurmtrain' has no attribute {name!r}")
