"""Variables from old recipes that are useless or harmful today, and variables that override slurmtrain's choices. Pure.

Sources: NCCL's user guide (2.32), "Environment Variables" and "Networking Troubleshooting"; ProcessGroupNCCL.hpp of
torch 2.13; doc/efa-env-var.md of aws-ofi-nccl. docs/network-profiles.md has the same table for users.
"""

from __future__ import annotations

from collections.abc import Mapping

_TORCH = {
    "NCCL_ASYNC_ERROR_HANDLING": "is TORCH_NCCL_ASYNC_ERROR_HANDLING since torch 2.2, which the agent sets to 1; "
    "leave it out",
    "NCCL_BLOCKING_WAIT": "is TORCH_NCCL_BLOCKING_WAIT since torch 2.2",
    "NCCL_DESYNC_DEBUG": "is TORCH_NCCL_DESYNC_DEBUG since torch 2.2",
    "NCCL_ENABLE_TIMING": "is TORCH_NCCL_ENABLE_TIMING since torch 2.2",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "is TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK since torch 2.2",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "has no effect since torch 2.8; leave it out",
}
_NCCL = {
    "NCCL_IB_GID_INDEX": "keeps NCCL (since 2.21) from finding each card's RoCE v2 address itself; leave it out",
    "NCCL_MIN_NCHANNELS": "is deprecated since NCCL 2.17; leave it out, or use NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "is deprecated since NCCL 2.17; leave it out, or use NCCL_MAX_CTAS",
    "NCCL_MIN_NRINGS": "was renamed in NCCL 2.5 and is deprecated since 2.17; leave it out, or use NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "was renamed in NCCL 2.5 and is deprecated since 2.17; leave it out, or use NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE": "is for debugging; values from older versions of NCCL cost speed or memory today; leave it out",
    "NCCL_TREE_THRESHOLD": "has no effect since NCCL 2.5, which chooses between trees and rings itself; leave it out",
    "NCCL_LL_THRESHOLD": "has no effect since NCCL 2.5, which chooses the protocol itself; leave it out",
    "NCCL_SINGLE_RING_THRESHOLD": "has no effect since NCCL 2.3; leave it out",
    "NCCL_IB_CUDA_SUPPORT": "has no effect since NCCL 2.4; leave it out, or use NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "is NCCL_NET_GDR_LEVEL since NCCL 2.4; leave it out, or use that",
}
_EFA = {
    "FI_EFA_USE_DEVICE_RDMA": "is not needed since libfabric 1.18 with aws-ofi-nccl 1.7; leave it out",
    "FI_EFA_FORK_SAFE": "is set by aws-ofi-nccl itself since 1.2; leave it out",
    "FI_EFA_ENABLE_SHM_TRANSFER": "has no effect with aws-ofi-nccl, which forbids such transfers; leave it out",
    "RDMAV_FORK_SAFE": "can break RDMA on newer kernels; leave it out, NCCL and aws-ofi-nccl handle forks themselves",
}
OBSOLETE: Mapping[str, str] = {**_TORCH, **_NCCL, **_EFA}

# With these values a variable only repeats the default.
_HARMLESS = {"NCCL_IB_GID_INDEX": "-1"}
# Google's scripts set NCCL's variables for Google's plugins, which check them; these name the plugins.
_GIB = "gib"
_SHIM = "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE"

_INTERFACE = "name the interface in network.interface instead"
_OURS = {
    "NCCL_SOCKET_IFNAME": _INTERFACE,
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "TP_SOCKET_IFNAME": _INTERFACE,
    "MASTER_ADDR": "leave it out",
    "MASTER_PORT": "leave it out",
    "RANK": "leave it out, it differs in each process",
    "LOCAL_RANK": "leave it out, it differs in each process",
    "WORLD_SIZE": "leave it out, it follows from resources",
}


def describe_obsolete(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that is obsolete or does harm, with what to do instead and since when.

    What Google's scripts set for NCCL on their machines is ignored: it belongs to their plugins.
    """
    present = [name for name in OBSOLETE if environ.get(name) not in (None, "", _HARMLESS.get(name))]
    if environ.get("NCCL_NET", "").lower() == _GIB or _SHIM in environ:
        present = [name for name in present if name not in _NCCL]
    others = sorted(name for name in environ if name.startswith("RDMAV_") and name not in OBSOLETE)
    return [
        *(f"{name} {OBSOLETE[name]}." for name in present),
        *(f"{name} should not be set; leave it out, NCCL and libfabric choose by themselves." for name in others),
    ]


def describe_overruled(environ: Mapping[str, str], set_by_us: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of a spec's ``env`` that differs from slurmtrain's own setting in ``set_by_us``."""
    sentences = []
    for name, advice in _OURS.items():
        value, ours = environ.get(name), set_by_us.get(name)
        if value is not None and value != ours:
            chosen = f"but slurmtrain sets it to {ours!r}" if ours is not None else "but slurmtrain sets it"
            sentences.append(f"{name} is {value!r} in env, {chosen}; {advice}.")
    return sentences
