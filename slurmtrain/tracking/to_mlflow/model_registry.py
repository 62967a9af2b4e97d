"""Registering exported models in MLflow's model registry."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import TrackingError
from slurmtrain.tracking.to_mlflow.sender import first_line

# What tells versions apart: the same weights in another format, or another module of the same checkpoint, is another.
_IDENTITY = ("slurmtrain.hash", "slurmtrain.object", "slurmtrain.format")


def ensure_model(client: Any, name: str) -> None:
    """Create a model in the registry unless there is one of this name. Raises TrackingError.

    Args:
        client: MLflow's.
        name: The name of the model.
    """
    from mlflow.exceptions import MlflowException

    with _asking(f"the model registry of the MLflow store does not take the model {name!r}"):
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def register_file(client: Any, mlflow_id: str, file: Path, name: str, tags: Mapping[str, str]) -> str:
    """Upload a file to an MLflow run, and make it a new version of a model that exists; returns the version.

    What is registered again, by its hash, module and format, is the same version.

    Args:
        client: MLflow's.
        mlflow_id: The MLflow run.
        file: The exported model.
        name: The name of the model.
        tags: Of the version, among them its hash, module and format.

    Raises:
        TrackingError: The store takes neither files nor the version.
    """
    with _asking(f"the model registry of the MLflow store cannot be read for {name!r}"):
        versions = client.search_model_versions(f"name = '{name}'")
    identity = [tags[key] for key in _IDENTITY]
    for version in versions:
        if version.run_id == mlflow_id and [version.tags.get(key) for key in _IDENTITY] == identity:
            return str(version.version)
    folder = f"model/{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"
    with _asking(f"the MLflow store does not take the file {file.name}"):
        client.log_artifact(mlflow_id, str(file), folder)
    with _asking(f"the model registry of the MLflow store does not take the model {name!r}"):
        source = f"{client.get_run(mlflow_id).info.artifact_uri}/{folder}"
        return str(client.create_model_version(name, source, mlflow_id, tags=dict(tags)).version)


@contextlib.contextmanager
def _asking(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # clients of all kinds of stores raise anything
        raise TrackingError(f"{problem}: {first_line(error)}") from error
