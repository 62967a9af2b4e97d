"""What can be looked up at once about a failure: files beside a missing one, modules beside a misspelt one."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Attempt, Run
from slurmtrain.runtime.environment.node import read_plan
from slurmtrain.system.owned_files import user_name

# Names in a directory that are looked at: some have millions.
_MOST_NAMES = 20_000


@dataclass(frozen=True)
class LookedUp:
    """The facts about an attempt, as :class:`~slurmtrain.model.diagnosis.last_words.Facts` has them."""

    is_local: bool
    folder: str
    python: str
    gpus: int
    copy: str
    """Where its command ran in the run's copy of its code, which stands for ``folder``; empty if there is none."""

    @classmethod
    def of_attempt(cls, directory: RunDir, run: Run, attempt: Attempt) -> LookedUp:
        """Those of an ``attempt`` of ``run``, which has this ``directory``."""
        plan: Plan | None = None
        with contextlib.suppress(PathError):
            plan = read_plan(directory.submission(attempt.submission).plan) or read_plan(directory.plan)
        return cls(
            is_local=(attempt.executor or run.executor) == "local",
            folder=plan.workdir if plan is not None else "",
            python=plan.python if plan is not None else "",
            gpus=int(run.resources.get("gpus_per_node") or 0),
            copy=str(plan.working_directory(directory.code)) if plan is not None and plan.code is not None else "",
        )

    def exists(self, path: str) -> bool:
        """Whether this machine has this ``path`` now."""
        # A directory that cannot be entered is an error for Path.exists.
        return any(os.path.exists(place) for place in self._places(path))  # noqa: PTH110

    def names_in(self, folder: str) -> Sequence[str]:
        """The names in a ``folder`` of this machine."""
        return list(_names_in(folder))

    def modules(self) -> frozenset[str]:
        """The modules that its interpreter can import here, with Python's own."""
        return self._modules

    def programs(self) -> frozenset[str]:
        """The programs on this machine's PATH."""
        return frozenset(name for folder in os.get_exec_path() for name in _names_in(folder))

    def owner(self, path: str) -> str:
        """The user and the rights of a ``path``, in words."""
        for place in self._places(path):
            with contextlib.suppress(OSError):
                status = os.stat(place)  # noqa: PTH116
                return f"{user_name(status.st_uid)} ({stat.filemode(status.st_mode)})"
        return ""

    def version(self, package: str) -> str:
        """The version of this ``package``."""
        for name in self._installed:
            head, _, rest = name.partition("-")
            if head == package and rest.endswith(".dist-info"):
                return rest.removesuffix(".dist-info")
        return ""

    def _places(self, path: str) -> Iterator[str]:
        """The path, and where the run has a copy of it."""
        yield path
        if self.copy and path.startswith(f"{self.folder}/"):
            yield self.copy + path.removeprefix(self.folder)

    @cached_property
    def _modules(self) -> frozenset[str]:
        names = {name.partition(".")[0] for name in self._installed if not name.endswith((".dist-info", ".pth"))}
        return (
            frozenset(name for name in names if name.isidentifier()) | sys.stdlib_module_names if names else frozenset()
        )

    @cached_property
    def _installed(self) -> Sequence[str]:
        """The names in the folders for packages, without running the interpreter, which may be somebody else's."""
        if self.python == sys.executable:
            folders = [folder for folder in sys.path if "-packages" in folder]
        else:
            prefix = Path(self.python).parent.parent
            folders = [str(folder) for folder in prefix.glob("lib*/python3*/*-packages")] if self.python else []
        return [name for folder in folders for name in _names_in(folder)]


def _names_in(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_MOST_NAMES), strict=False):
            yield entry.name
