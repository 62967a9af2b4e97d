"""What is in the directories that W&B writes offline, in the order in which ``wandb sync`` sends them.

A ``.wandb`` file is a header of 7 bytes, then LevelDB's log format: blocks of 32 KiB with chunks, each with a checksum
(4 bytes), a length (2) and a kind (1): whole, first, middle or last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 1 << 15
_CHUNK_HEADER = 7
_WHOLE, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    content, position, record = path.read_bytes(), _FILE_HEADER, b""
    while position + _CHUNK_HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += _CHUNK_HEADER
        record += content[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            record = b""
            yield message


def synced_history(directory: Path) -> dict[str, dict[int, float]]:
    """The history that a run would have once all its directories are synced, by metric and step."""
    history: dict[str, dict[int, float]] = {}
    for path in sorted(directory.glob("offline-run-*/*.wandb")):
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run" and record.run.HasField("branch_point"):
                cut = record.run.branch_point.value
                for values in history.values():
                    for step in [step for step in values if step > cut]:
                        del values[step]
            elif kind == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for name, value in items.items():
                    if not name.startswith("_"):
                        assert items["_step"] not in history.setdefault(name, {}), "a step is there twice"
                        history[name][items["_step"]] = value
    return history
