"""The files that a snapshot of code holds, read one after the other and verified."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator

from slurmtrain.errors import PathError
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.spec.code import LINK, CodeFile
from slurmtrain.runtime.code.tree import read_manifest
from slurmtrain.system.files import describe_os_error
from slurmtrain.system.owned_files import open_checked


def read_contents(run: RunDir, name: str) -> Iterator[tuple[CodeFile, bytes]]:
    """Each file of a snapshot, with its content; a symbolic link has none.

    Args:
        run: A run in the same runs root.
        name: The snapshot's hash.

    Raises:
        PathError: The snapshot is missing or damaged.
    """
    manifest, path = read_manifest(run, name), run.snapshot(name).contents
    try:
        with os.fdopen(open_checked(path), "rb") as packed, gzip.GzipFile(fileobj=packed) as contents:
            for file in manifest.files:
                content = b"" if file.kind == LINK else contents.read(file.size)
                if file.kind != LINK and hashlib.sha256(content).hexdigest() != file.digest:
                    raise ValueError(f"{file.path} has another content")
                yield file, content
    except FileNotFoundError:
        raise PathError(f"the snapshot {path.parent} is damaged: there is no {path.name}") from None
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise PathError(f"the snapshot {path.parent} is damaged ({error})") from error
    except OSError as error:
        raise PathError(f"cannot read {path}: {describe_os_error(error)}") from error
