"""Meets the other ranks as scripts for srun do, in several ways one after the other, and prints what came of each.

Usage: ``styles.py PORT``; ports from there on must be free on the first node.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist

VARIABLES = ("SLURM_", "PMI", "OMPI_", "SUBMITIT_")


def first_host() -> str:
    """The first node, as mm-style scripts ask for it; on a machine without Slurm, this one."""
    nodes = os.environ["SLURM_NODELIST"]
    return subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    ).stdout.split()[0]


def like_jax() -> tuple[str, int, int]:
    """The coordinator, how many processes there are, and which this is: as in jax._src.clusters.slurm_cluster."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    place = next((i for i, letter in enumerate(nodes) if letter in ",["), len(nodes))
    if nodes[place : place + 1] == "[":
        end = next(i for i, letter in enumerate(nodes) if letter in ",-]" and i > place)
        host = nodes[:place] + nodes[place + 1 : end]
    else:
        host = nodes[:place]
    return host, int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_PROCID"])


def meet(style: str, **options: object) -> None:
    """Join a group, and print its size and this rank, and what the ranks of all add up to."""
    dist.init_process_group("gloo", **options)
    ranks = torch.tensor([dist.get_rank()])
    dist.all_reduce(ranks)
    line = f"style {style} {dist.get_rank()} {dist.get_world_size()} {os.environ['SLURM_LOCALID']} {int(ranks)}"
    dist.barrier()
    dist.destroy_process_group()
    print(line, flush=True)


def main() -> None:
    port = int(sys.argv[1])
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            print(f"variable {name}={value}", flush=True)
    meet("tcp", init_method=f"tcp://{first_host()}:{port}", rank=rank, world_size=world_size)
    host, count, number = like_jax()
    meet("jax", init_method=f"tcp://{host}:{port + 1}", rank=number, world_size=count)
    # The port stays: it is that of the agent's store, whatever the first node is called.
    os.environ |= {"MASTER_ADDR": first_host(), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    meet("mm")


if __name__ == "__main__":
    main()
