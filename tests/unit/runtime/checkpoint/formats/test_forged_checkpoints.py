"""Checkpoints that somebody forged, so that looking at them would fail, take for ever, or leave their directory."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint.external import Search, find_checkpoints, fingerprint, read_contents
from slurmtrain.runtime.checkpoint.formats.untrusted_files import list_tree

HUGE = 2**500
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What takes more than some gigabytes fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def archive(path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file like one of torch.save, whose members may be compressed."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a/data.pkl", pickle.dumps({"step": 7, "x": bytes(10_000_000)}, 2))
        file.writestr("a/version", "3")
    return path


def encrypted(path: Path) -> Path:
    """An archive whose members need a password."""
    content = bytearray(archive(path).read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(magic)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(magic, at + 1)
    path.write_bytes(content)
    return path


def far_away(path: Path) -> Path:
    """An archive with a member at an offset that no file has."""
    content = archive(path).read_bytes()
    at = content.rfind(b"PK\x01\x02")
    entry, end = bytearray(content[at : content.rfind(b"PK\x05\x06")]), content[content.rfind(b"PK\x05\x06") :]
    extra = struct.pack("<HHQ", 1, 8, 2**64 - 2)
    entry[30:32] = struct.pack("<H", len(extra))
    entry[42:46] = b"\xff" * 4
    path.write_bytes(content[:at] + bytes(entry) + extra + end)
    return path


def of_transformers(state: str) -> Callable[[Path], Path]:
    """A directory of the Trainer of transformers with this state."""

    def make(path: Path) -> Path:
        directory = path.with_name("checkpoint-7")
        directory.mkdir()
        (directory / "trainer_state.json").write_text(state)
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
        return directory

    return make


def distributed(**info: Any) -> Callable[[Path], Path]:
    """A directory of torch.distributed.checkpoint whose index says this of where its contents are."""

    def make(path: Path) -> Path:
        dcp.save({"w": torch.zeros(9), "step": 7}, checkpoint_id=path)
        index = path / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        for place in metadata.storage_data.values():
            vars(place).update(info)
        index.write_bytes(pickle.dumps(metadata))
        return path

    return make


FORGED: dict[str, Callable[[Path], Path]] = {
    "a compressed archive": lambda path: archive(path, zipfile.ZIP_DEFLATED),
    "an encrypted archive": encrypted,
    "an archive that goes on elsewhere": far_away,
    "deep JSON": of_transformers(DEEP),
    "a step of many digits": of_transformers(json.dumps({"global_step": HUGE})),
    "an index of huge lengths": distributed(length=HUGE),
    "an index of huge offsets": distributed(offset=HUGE),
    "an index whose contents overlap": distributed(offset=0, length=2000),
    "an index that leads elsewhere": distributed(relative_path="../secret"),
    "an index that leads to a file of the system": distributed(relative_path="/etc/passwd"),
}


@pytest.mark.parametrize("make", FORGED.values(), ids=FORGED)
def test_looking_at_it_costs_little_and_finds_no_whole_checkpoint(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / "a.pt")
    began = time.process_time()
    [checkpoint] = find_checkpoints(Search(pattern=str(path)))
    assert not checkpoint.complete, checkpoint
    assert fingerprint(list_tree(path))
    assert time.process_time() - began < 10, "it took too long"


def nested(path: Path) -> Path:
    """A file of torch.save with lists in each other, deeper than functions can call each other."""
    content = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    torch.save({}, path)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            after.writestr(name, content if name.endswith("data.pkl") else before.read(name))
    return path


def itself(path: Path) -> Path:
    """A file of torch.save with a dictionary that contains itself."""
    state: dict[str, Any] = {"step": 7}
    state["state"] = state
    torch.save(state, path)
    return path


@pytest.mark.parametrize("make", [nested, itself])
def test_contents_without_an_end_are_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="levels deep"):
        read_contents(make(tmp_path / "a.pt"))
