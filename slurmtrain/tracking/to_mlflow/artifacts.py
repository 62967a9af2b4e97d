"""The files of a run that MLflow shows as artifacts: spec, plan, changes of the code, environment.

They are small, and have no secrets: secrets were removed when the files were written. They are sent when they are new.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.system.owned_files import open_readable

# The folder in MLflow.
FOLDER = "slurmtrain"
_TAG = "slurmtrain.artifacts"
_MOST_BYTES = 4 << 20


def send_artifacts(client: Any, shown: Any, run: Run, directory: RunDir) -> str:
    """Send the files of a run that its MLflow run does not have; returns why that fails, once, else nothing.

    Args:
        client: MLflow's.
        shown: The MLflow run.
        run: The run.
        directory: Its directory.
    """
    files = _read(run, directory)
    digest = _digest(files)
    if not files or shown.data.tags.get(_TAG, "").startswith(digest):
        return ""
    problem = ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            client.log_artifacts(shown.info.run_id, folder, FOLDER)
    except Exception as error:  # noqa: BLE001 (clients of stores raise anything)
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    client.set_tag(shown.info.run_id, _TAG, f"{digest} {'refused' if problem else 'sent'}")
    return problem


def _read(run: Run, directory: RunDir) -> Mapping[str, bytes]:
    """The files as they are, by their names in MLflow."""
    newest = run.newest
    plan = directory.submission(newest.submission).plan if newest else directory.plan
    paths = {
        "spec.yaml": directory.spec,
        "plan.json": plan if plan.exists() else directory.plan,
        "code.diff": directory.code_difference,
        "environment.txt": directory.environment,
    }
    files = {}
    for name, path in paths.items():
        try:
            with open_readable(path) as file:
                content = file.read(_MOST_BYTES + 1)
        except (OSError, PathError):
            continue
        if 0 < len(content) <= _MOST_BYTES:
            files[name] = content
    return files


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
