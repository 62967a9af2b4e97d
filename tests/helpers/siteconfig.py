"""A site as slurmtrain reads it from a real cluster: captured output of scontrol and sacctmgr of Slurm 22.05."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmtrain.model.interruption.outlook import JobFacts, Outlook, SiteFinding, make_outlook
from slurmtrain.model.interruption.preemption import Qos
from slurmtrain.slurm.parse import read_partitions
from slurmtrain.slurm.site import Site, read_associations, read_cluster, read_config, read_partition, read_qos

_CAPTURED = Path(__file__).with_name("slurm-22.05")
CONFIG = (_CAPTURED / "config.txt").read_text()
PARTITIONS = (_CAPTURED / "partitions.txt").read_text()
QOS = (_CAPTURED / "qos.txt").read_text()
ASSOCIATIONS = (_CAPTURED / "associations.txt").read_text()


def config(**changes: str) -> str:
    """The configuration with other values, in Slurm's own columns; missing names are added."""
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
    """The cluster with other values. ``qos``: None if accounting does not answer."""
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


def outlook_on(cluster: Site | None = None, partition: str = "spot", **job: Any) -> Outlook:
    """The outlook for a job in a partition of a cluster, by default the captured one."""
    on = cluster or site()
    return make_outlook(on.cluster, on.partitions[partition], list(on.partitions.values()), on.qos, JobFacts(**job))


def severities(outlook: Outlook, *names: str) -> dict[str, str]:
    """The severity of each finding by its subject; only for these names, if there are any."""
    return {finding.about: finding.severity for finding in outlook.findings if not names or finding.about in names}


def finding_about(outlook: Outlook, name: str) -> SiteFinding:
    """The first finding about a setting."""
    return next(finding for finding in outlook.findings if finding.about == name)
