"""Reading all of a script's own checkpoint, to compare it with the checksums that its formats contain.

Archives, which ``torch.save`` writes, have a checksum for each tensor. Files of torch.distributed.checkpoint are
sequences of archives. Safetensors files have no checksums.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.formats.archives import checksum_problem, is_archive
from slurmtrain.runtime.checkpoint.formats.dcp import INDEX, SHARD, read_item, read_items
from slurmtrain.runtime.checkpoint.formats.trees import FileTree


def find_damage(tree: FileTree) -> Iterator[str]:
    """What differs from what was written, as phrases; reads every file of the ``tree`` that has checksums.

    The checkpoint must be complete. Raises OSError.
    """
    for name in sorted(tree.sizes):
        path = tree.path / name
        if name.endswith(SHARD):
            continue
        if is_archive(path) and (problem := checksum_problem(path)):
            yield f"{name or tree.path.name}: {problem}"
    for folder in ("", *sorted({name.rpartition("/")[0] for name in tree.sizes if "/" in name})):
        part = tree.below(folder) if folder else tree
        if INDEX in part.top:
            yield from _damaged_items(part)


def _damaged_items(tree: FileTree) -> Iterator[str]:
    """The items of a directory of torch.distributed.checkpoint that differ from what was written."""
    try:
        items = read_items(tree)
    except CheckpointError as error:
        yield str(error)
        return
    for item in items:
        problem = checksum_problem(io.BytesIO(read_item(tree, item)))
        if problem:
            yield f"{item.name} in {item.file}: {problem}"
