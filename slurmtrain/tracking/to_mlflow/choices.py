"""Which MLflow run shows a run, or a sweep, where several processes may each create one at the same time.

Node 0 of a run creates its MLflow run, and so may a command. MLflow has no tag that only one run can have, and cannot
create a run on condition that there is none. So it is a file that decides: whoever has created an MLflow run links a
file that names it, which only one process can do, and the others use that one and delete their own. If a process is
killed before it links the file, the next one finds its MLflow run by a tag, and links that.

When the MLflow run that was chosen is replaced, or deleted by somebody, another choice says what comes after it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from slurmtrain.errors import PathError
from slurmtrain.system.files import link_json, make_directory, read_json

FIRST = ""
"""Instead of an MLflow run, for the choice of the first one."""


class Choices:
    """The MLflow runs that were chosen for one subject, one after the other."""

    def __init__(self, folder: Path, *subject: str) -> None:
        """``folder``: where the files are. ``subject``: what tells this subject from others with the same folder."""
        self._folder = folder
        self._subject = subject

    def after(self, mlflow_id: str) -> str | None:
        """The MLflow run that was chosen after another one, or after :data:`FIRST`; None: that is still open.

        Raises PathError.
        """
        choice = read_json(self._file(mlflow_id), types={"mlflow_run_id": "str"})
        if choice is None:
            return None
        if not choice.get("mlflow_run_id"):
            raise PathError(f"{self._file(mlflow_id)} names no MLflow run; remove it")
        return str(choice["mlflow_run_id"])

    def choose(self, mlflow_id: str, after: str) -> str:
        """Choose an MLflow run ``after`` another one; returns the one that is chosen, maybe by somebody else.

        Raises OSError; PathError.
        """
        make_directory(self._folder)
        link_json(self._file(after), {"mlflow_run_id": mlflow_id, "after": after, "of": list(self._subject)})
        chosen = self.after(after)
        assert chosen is not None
        return chosen

    def _file(self, after: str) -> Path:
        name = hashlib.sha256("\n".join([*self._subject, after]).encode()).hexdigest()[:24]
        return self._folder / f"{name}.json"
