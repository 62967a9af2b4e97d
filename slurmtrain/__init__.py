"""slurmtrain: from one YAML file to a finished training run, through every preemption.

Importing this package loads neither torch nor sqlalchemy: :func:`session` is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmtrain.version import __version__

__all__ = ["__version__", "session"]

if TYPE_CHECKING:
    from slurmtrain.runtime.training.session import session


def __getattr__(name: str) -> object:
    if name == "session":
        from slurmtrain.system.interpreter import importing

        with importing():
            from slurmtrain.runtime.training.session import session
        return session
    raise AttributeError(f"module 'slurmtrain' has no attribute {name!r}")
