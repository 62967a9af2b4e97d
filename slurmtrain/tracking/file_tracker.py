"""What trackers have in common that show runs in files on this machine."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from slurmtrain.errors import PathError, TrackingError
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.system.files import describe_os_error
from slurmtrain.tracking.tracker import Tracker


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a tracker has written of a run, which goes with the run's own files.

    ``names``: files and folders in ``directory``; ``is_foreign``: whether a file in them, by its path relative to
    ``directory``, was not written by the tracker.
    """

    directory: Path
    names: Sequence[str]
    is_foreign: Callable[[str], bool] = lambda _: False


class FileTracker(Tracker):
    """Shows runs in a directory. Its setting ``dir`` is relative to the runs root.

    ``usual``: the value of ``dir`` where the spec has none; ``folder``: the folder that it makes there, if any;
    ``kind``: the purpose of the directory, for messages.
    """

    truncates: ClassVar[bool] = True
    usual: ClassVar[str]
    folder: ClassVar[str] = ""
    kind: ClassVar[str]

    def __init__(self, settings: Mapping[str, Any], root: RunsRoot) -> None:
        """As :meth:`Tracker.__init__` with its ``settings`` and ``root``."""
        super().__init__(settings, root)
        self._directory = self._directory_of(settings, root)
        self.uri = self._directory.absolute().as_uri()
        self.label = f"the directory {self._directory} for {self.kind}"

    @classmethod
    @abstractmethod
    def files_of(cls, settings: Mapping[str, Any], root: RunsRoot, run_id: str) -> WrittenFiles:
        """What there is of a run. Its package need not be installed any more.

        Args:
            settings: The tracker's section of the spec.
            root: The runs root.
            run_id: The run.
        """

    @classmethod
    def _directory_of(cls, settings: Mapping[str, Any], root: RunsRoot) -> Path:
        return root.path / Path(settings.get("dir") or cls.usual).expanduser() / cls.folder

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises TrackingError for what writing may raise."""
        try:
            yield
        except OSError as error:
            raise TrackingError(f"cannot write to {self._directory}: {describe_os_error(error)}") from error
        except (PathError, ValueError) as error:
            raise TrackingError(f"cannot write to {self._directory}: {error}") from error
