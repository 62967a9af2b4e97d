"""What to write instead of an option of sbatch or srun, as far as that depends on its value."""

from __future__ import annotations

import re

from slurmtrain.model.spec.slurm.option_table import BINDINGS, SLURM_OPTIONS, UNBOUND

_GPU = re.compile(r"(?:gres[/:])?gpu(?:[:=](?P<type>[A-Za-z][\w.+-]*))?(?:[:=](?P<count>\d+))?", re.ASCII)
_COUNT = re.compile(r"(?:(?P<type>[A-Za-z][\w.+-]*)[:=])?(?P<count>\d+)", re.ASCII)
# What options that bind tasks mean for ranks.
_BIND = {
    "cores": "cores", "rank": "cores", "threads": "cores", "map_cpu": "cores", "mask_cpu": "cores",
    "sockets": "numa", "ldoms": "numa", "rank_ldom": "numa", "map_ldom": "numa", "local": "numa", "map_mem": "numa",
    "closest": "gpu",
}  # fmt: skip


def advice_on(program: str, name: str, value: object, nodes: int | None) -> str | None:
    """What to write instead of an option; an empty text: it is passed on; None: no version of Slurm has it.

    Args:
        program: ``sbatch`` or ``srun``.
        name: the option's long name.
        value: its value; True: it has none.
        nodes: how many nodes the job has; None: that is not known.
    """
    option = SLURM_OPTIONS.get(name)
    advice = None if option is None else option.advice(program)
    if advice is None:
        return None
    text = str(value)
    if name == "gres":
        return _advice_on_gres(text) or advice
    if name in ("gpus", "gpus-per-node"):
        return _advice_on_gpus(text, nodes if name == "gpus" else 1) or advice
    if name in BINDINGS:
        kinds = [kind.partition(":")[0] for kind in text.lower().split(",")]
        bind = next((_BIND[kind] for kind in kinds if kind in _BIND), None)
        if UNBOUND.issuperset(kinds):
            return ""
        return f"{advice[:-1]}: {bind}'" if bind else advice
    return advice


def _advice_on_gres(value: str) -> str:
    """What to write instead of generic resources with GPUs; empty if there are none among them."""
    items = value.split(",")
    gpus = [match for item in items if (match := _GPU.fullmatch(item.strip()))]
    if not gpus:
        return ""
    rest = ",".join(item for item in items if not _GPU.fullmatch(item.strip()))
    kept = f", beside 'gres: {rest}'" if rest else ""
    if len(gpus) > 1:
        return f"ranks follow the number of GPUs: use 'resources.gpus_per_node' for one type of them{kept}"
    return f"ranks follow the number of GPUs: use 'resources.gpus_per_node: {_written(gpus[0])}'{kept}"


def _advice_on_gpus(value: str, nodes: int | None) -> str:
    """What to write instead of a number of GPUs on so many ``nodes``; empty if it cannot be divided."""
    match = _COUNT.fullmatch(value.strip())
    if match is None or not nodes or int(match["count"]) % nodes:
        return ""
    return f"ranks follow the number of GPUs: use 'resources.gpus_per_node: {_written(match, nodes)}'"


def _written(match: re.Match[str], nodes: int = 1) -> str:
    count = int(match["count"] or 1) // nodes
    return f"{match['type']}:{count}" if match["type"] else str(count)
