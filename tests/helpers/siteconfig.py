"""What scontrol and sacctmgr of Slurm 22.05 print of a real cluster, as a site that slurmtrain has asked."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.model.interruption.preemption import Qos
from slurmtrain.slurm.parse import read_partitions
from slurmtrain.slurm.site import Site, read_associations, read_cluster, read_config, read_partition, read_qos

_CAPTURED = Path(__file__).with_name("slurm-22.05")
CONFIG = (_CAPTURED / "config.txt").read_text()
PARTITIONS = (_CAPTURED / "partitions.txt").read_text()
QOS = (_CAPTURED / "qos.txt").read_text()
ASSOCIATIONS = (_CAPTURED / "associations.txt").read_text()


def config(**changes: str) -> str:
    """The configuration with other values, in Slurm's own columns; names that it does not have are added."""
    lines = CONFIG.splitlines()
    for name, value in changes.items():
        written = f"{name:<24}= {value}"
        place = next((place for place, line in enumerate(lines) if line.split(" ", 1)[0] == name), None)
        if place is None:
            lines.insert(1, written)
        else:
            lines[place] = written
    return "\n".join(lines) + "\n"


def partitions(**changes: str) -> str:
    """The partitions, with other values in all of them."""
    text = PARTITIONS
    for name, value in changes.items():
        before = [word for word in text.split() if word.startswith(f"{name}=")]
        for word in before:
            text = text.replace(f" {word} ", f" {name}={value} ")
    return text


def site(*, qos: str | None = QOS, partition: dict[str, str] | None = None, **changes: str) -> Site:
    """The cluster with other values. ``qos``: None where accounting does not answer."""
    cluster = read_cluster(read_config(config(**changes)))
    places = read_partitions(partitions(**(partition or {})))
    qos_by_name: dict[str, Qos] | None = None if qos is None else read_qos(qos)
    return Site(
        cluster=cluster,
        partitions={name: read_partition(fields, cluster) for name, fields in places.items()},
        config={},
        qos=qos_by_name,
        associations=read_associations(ASSOCIATIONS),
    )
