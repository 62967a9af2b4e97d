"""One runs root with its configuration and registry: what every verb works on."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.config import Config
from slurmtrain.errors import PathError, UntrustedPath
from slurmtrain.model.run.layout import RunsRoot, is_unborn, run_id, run_ids_among
from slurmtrain.system.files import DIRECTORY_MODE, SHARED_DIRECTORY_MODE, describe_os_error, make_directory
from slurmtrain.system.owned_files import open_directory

if TYPE_CHECKING:
    from slurmtrain.model.run.layout import RunDir
    from slurmtrain.registry.store import Store
    from slurmtrain.slurm.scheduler import Scheduler
    from slurmtrain.system.journal import Journal


class Workspace:
    """The runs of one root, with its registry and its scheduler, both created on first use."""

    def __init__(
        self,
        config: Config,
        *,
        looks_again: bool = False,
        scheduler: Scheduler | None = None,
        warn: Callable[[str], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Open the root that ``config`` names.

        ``looks_again``: for a command that polls the runs until something happens, and so asks Slurm again every
        ``slurm_interval``. ``scheduler``: asked instead of Slurm. ``warn``: called when the registry fails; ``note``,
        by default the same, once it was replaced. Without either, nothing is replaced.
        """
        self.config = config
        self.looks_again = looks_again
        self.patience_s: float | None = None
        """How many seconds Slurm has to say where jobs stand, for a command that shows what is known without it."""
        self._scheduler = scheduler
        self._warn = warn
        self.note = note or warn
        """Called with what was done about a registry that could not be used."""

    @property
    def root(self) -> RunsRoot:
        """Where the run directories are."""
        return RunsRoot(self.config.runs)

    @property
    def has_registry(self) -> bool:
        """Whether there may be a registry: a command that finds none, and no runs, need not create one."""
        registry = self.config.registry
        # Only by asking a server could one know what is there: the runs root stands for it.
        return (registry if isinstance(registry, Path) else self.config.runs).exists()

    @cached_property
    def store(self) -> Store:
        """The registry, or what replaces it while it fails. Raises RegistryNewer."""
        from slurmtrain.registry.store import Spare, Store

        def directories() -> list[RunDir]:
            return [self.root.run(run_id) for run_id in self.run_ids()]

        return Store(self.config.registry, Spare(directories, self._warn or (lambda _: None), self.note))

    @property
    def scheduler(self) -> Scheduler:
        """Slurm: asked once, or every ``slurm_interval`` by a command that polls."""
        if self._scheduler is None:
            from slurmtrain.slurm.scheduler import Scheduler

            if self.looks_again:
                self._scheduler = Scheduler(self.config.slurm_interval, self.root.scheduler_cache, self.patience_s)
            else:
                self._scheduler = Scheduler(math.inf, None, self.patience_s)
        return self._scheduler

    def close(self) -> None:
        """Close the registry, if it was opened."""
        if "store" in vars(self):
            self.store.close()

    def looking_again(self) -> Workspace:
        """The same runs, for a loop. The scheduler's earlier answers are not carried over: they may be old."""
        again = Workspace(self.config, looks_again=True, warn=self._warn, note=self.note)
        again.patience_s = self.patience_s
        if "store" in vars(self):
            again.store = self.store
        return again

    def run_ids(self) -> list[str]:
        """Ids of all run directories, oldest first. Raises PathError if the root cannot be read."""
        return sorted(self.present())

    def present(self, run_ids: Collection[str] | None = None) -> frozenset[str]:
        """Ids of all run directories, or only ids in ``run_ids``. Raises PathError if the root cannot be read."""
        if run_ids is None:
            return frozenset(run_ids_among(self._names()))
        try:
            root = self._open_root()
        except FileNotFoundError:
            return frozenset()
        try:
            # One by one: a root may have thousands of runs, and a command asks for few.
            present = set(run_ids_among(run_ids))
            for run_id in tuple(present):
                try:
                    os.stat(run_id, dir_fd=root, follow_symlinks=False)
                except FileNotFoundError:
                    present.remove(run_id)
                except OSError:
                    pass  # it is there, though nothing is known of it
            return frozenset(present)
        finally:
            os.close(root)

    def new_id(self) -> str:
        """An id that no run has. Two commands may draw the same in a millisecond: creating its directory decides."""
        while True:
            # 10 bits fill the two digits that an id has for them (model/run/layout).
            new = run_id(time.time_ns() // 1_000_000, secrets.randbits(10))
            if not self.root.run(new).path.exists():
                return new

    def unborn(self) -> list[RunDir]:
        """Run directories that were never finished."""
        return [self.root.unborn(name.removeprefix(".new-")) for name in self._names() if is_unborn(name)]

    def prepare(self) -> None:
        """Make sure that runs can be written here, and by nobody else. Raises PathError."""
        if self.config.shared_root is None:
            if not self.root.path.exists():
                make_directory(self.root.path)
                # Runs are large, and most roots are in a checkout: git is to take no notice. Without this file nothing
                # else is wrong.
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with contextlib.suppress(OSError):
                    handle = os.open(self.root.path / ".gitignore", flags, 0o600)
                    with os.fdopen(handle, "w") as file:
                        file.write("*\n")
        elif not self.root.path.exists():
            _make_own_directory(self.config.shared_root, self.root.path)
        os.close(self._open_root())
        if not os.access(self.root.path, os.W_OK | os.X_OK):
            raise PathError(
                f"cannot write to the runs root {self.root.path}; choose another one with --runs or SLURMTRAIN_RUNS"
            )

    def make_run_directory(self, run: RunDir) -> None:
        """Create the directory of a run. Raises OSError, such as FileExistsError."""
        run.path.mkdir(mode=DIRECTORY_MODE)
        if self.config.shared_root is not None:
            run.path.chmod(SHARED_DIRECTORY_MODE)

    @contextlib.contextmanager
    def journal(self, run: RunDir, command: str) -> Iterator[Journal]:
        """A journal for this command in a run."""
        # Imported here: most commands write no journal, and its imports take longer than all others here.
        from slurmtrain.system.journal import command_journal

        with command_journal(run.journals, command) as journal:
            yield journal

    def _names(self) -> list[str]:
        try:
            root = self._open_root()
        except FileNotFoundError:
            return []
        try:
            return os.listdir(root)
        finally:
            os.close(root)

    def _open_root(self) -> int:
        """Open the runs root. Raises FileNotFoundError; PathError if it cannot be read, or be trusted.

        Commands act on what is in it, so nobody else may be able to put anything there.
        """
        try:
            return open_directory(self.root.path)
        except UntrustedPath as error:
            own = "choose a runs root of your own with --runs or SLURMTRAIN_RUNS"
            cure = own if "belongs to" in error.why else error.cure
            raise UntrustedPath(f"the runs root {error.why}", f"{cure}; to share one, see docs/sharing.md") from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise PathError(f"cannot read the runs root {self.root.path}: {describe_os_error(error)}") from error


def _make_own_directory(shared_root: Path, own: Path) -> None:
    """Create the user's ``own`` directory in a root that a group shares. Raises PathError."""
    # Under another name first, so that no command finds it while its group is not yet the root's.
    unborn = own.with_name(f".{own.name}.{os.getpid()}.new")
    try:
        unborn.mkdir(mode=DIRECTORY_MODE)
        # By its descriptor: others can rename what is in this root, and put a link in its place.
        handle = open_directory(unborn)
        try:
            os.fchown(handle, -1, shared_root.stat().st_gid)
            os.fchmod(handle, SHARED_DIRECTORY_MODE)
        finally:
            os.close(handle)
        unborn.rename(own)
    except FileNotFoundError:
        raise PathError(
            f"the shared runs root {shared_root} does not exist; docs/sharing.md says how to create it"
        ) from None
    except OSError as error:
        with contextlib.suppress(OSError):
            unborn.rmdir()
        raise PathError(f"cannot create the directory {own}: {describe_os_error(error)}") from error


def person() -> str:
    """The user who runs this command, and the machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # A container may not know the account: KeyError until Python 3.12, OSError from 3.13 on.
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
