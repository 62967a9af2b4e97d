"""The GPUs of this node's part of the job, by NVML, the kernel log and a matrix product.

NVML comes with the package nvidia-ml-py, which need not be installed; without it, only torch's matrix product is
checked.

That product is computed by a child process, ``python gpus.py SECONDS``: a CUDA context holds GPU memory for as long as
its process lives, so the node agent, which lives as long as the run, never makes one. The child imports nothing of
slurmtrain. It prints ``{"count": GPUs, "built_for": version or null}``, then a line for each GPU as soon as it is done:
``{"gpu": index, "name", "memory", "ms", "tflops"}`` or ``{"gpu": index, "error": text}``. After SECONDS it is killed by
its own alarm, in case its parent is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

KERNEL_LOG = Path("/dev/kmsg")
# The longest record of /dev/kmsg, by the kernel's CONSOLE_EXT_LOG_MAX.
_RECORD = 8192
# Of the masks that NVML names CPUs by.
_WORD_BITS = 64
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)[^\n]*")
_BUS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)")
# Answers that mean that there is no figure, not that the GPU is broken: invalid argument (for parts of a GPU), not
# supported, no permission, function not found (in an older driver). Source: nvmlReturn_t of the NVML reference.
_NO_FIGURE = frozenset({2, 3, 4, 13})
# How long a child that was killed may take to end; one that hangs in the driver never does.
_REAP_S = 1.0


def load_nvml() -> Any | None:
    """The module of nvidia-ml-py; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def cpus_near_gpus(ranks: int, visible: str | None) -> list[set[int]]:
    """The CPUs near the GPU of each rank; empty where NVML does not say.

    Args:
        ranks: How many ranks this node has.
        visible: CUDA_VISIBLE_DEVICES, which says which GPUs they share; None: all.
    """
    nvml = load_nvml()
    if nvml is None:
        return [set()] * ranks
    near: list[set[int]] = []
    words = (max(os.cpu_count() or 1, 1) + _WORD_BITS - 1) // _WORD_BITS
    with suppress(nvml.NVMLError), nvml_session(nvml):
        for handle in open_gpus(nvml, visible):
            masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
            # Words of 64 bits, the first CPUs' word first.
            bits = sum(mask << _WORD_BITS * word for word, mask in enumerate(masks))
            near.append({cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1})
    # As the library does: GPUs are dealt out to ranks in turn.
    return [near[rank % len(near)] for rank in range(ranks)] if near else [set()] * ranks


def driver_version(nvml: Any | None) -> str | None:
    """The version of NVIDIA's driver; None if NVML does not answer."""
    if nvml is None:
        return None
    try:
        with nvml_session(nvml):
            return _decoded(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def names_of_gpus(nvml: Any | None, visible: str | None) -> list[str]:
    """The models of the visible GPUs; empty if NVML does not answer.

    Args:
        nvml: The module of nvidia-ml-py, or None.
        visible: The value of CUDA_VISIBLE_DEVICES.
    """
    return [gpu["name"] for gpu in _query_nvml(nvml, visible)["gpus"] if gpu.get("name")]


def inspect_gpus(requested: int, environ: Mapping[str, str], limit_s: float, nvml: Any | None) -> Facts:
    """Facts of the GPUs that this job can see.

    Args:
        requested: How many GPUs of this node the job requested.
        environ: The environment of the ranks, which says which GPUs they can see.
        limit_s: Seconds for the matrix product.
        nvml: The module of nvidia-ml-py, or None.
    """
    by_nvml = _query_nvml(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    log: Facts = {"xids": None, "kernel_log": None}
    try:
        # Since the machine started, as far back as the log goes.
        log["xids"] = find_xids(read_kernel_log(KERNEL_LOG), {gpu["bus"] for gpu in by_nvml["gpus"] if gpu.get("bus")})
    except OSError as error:
        log["kernel_log"] = (error.strerror or str(error)).lower()
    # After NVML, which reports how much memory is in use: the product uses some itself.
    product = run_gemm(environ, limit_s)
    if by_nvml["count"] is None:
        if "skip" in product:
            return {"skip": f"GPUs cannot be inspected: {by_nvml['nvml']}, and {product['skip']}"}
        by_nvml["count"] = product.get("count")
    return {"asked": requested, **by_nvml, **log, "gemm": product}


# --- NVML -------------------------------------------------------------------------------------------------------


def visible_devices(value: str | None, count: int) -> list[int | str]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows of ``count``, in its order: indices, or UUIDs as written.

    ``value`` is that variable's; None shows all. Like CUDA, it stops at the first entry that names no GPU, and shows
    none at all if one is named twice. Source: CUDA Programming Guide, environment variables.
    """
    if value is None:
        return list(range(count))
    entries: list[int | str] = []
    for entry in value.split(","):
        entry = entry.strip()
        if entry.startswith(("GPU-", "MIG-")):
            entries.append(entry)
        elif entry.isascii() and entry.isdigit() and int(entry) < count:
            entries.append(int(entry))
        else:
            break
    return entries if len(set(entries)) == len(entries) else []


def _query_nvml(nvml: Any | None, visible: str | None) -> Facts:
    """Facts of the visible GPUs by NVML; their item ``nvml`` is None, or says why there are none.

    ``visible`` is the value of CUDA_VISIBLE_DEVICES.
    """
    no_facts: Facts = {"count": None, "mig": False, "gpus": []}
    if nvml is None:
        return {"nvml": "nvidia-ml-py is not installed", **no_facts}
    try:
        with nvml_session(nvml):
            entries = visible_devices(visible, nvml.nvmlDeviceGetCount())
            gpus = [gpu for entry in entries if (gpu := _gpu(nvml, entry)) is not None]
    except nvml.NVMLError as error:
        return {"nvml": f"NVML: {error}", **no_facts}
    mig = any(isinstance(entry, str) and entry.startswith("MIG-") for entry in entries)
    return {"nvml": None, "count": len(gpus), "mig": mig, "gpus": gpus}


def open_gpus(nvml: Any, visible: str | None) -> list[Any]:
    """The handles of the visible GPUs, while NVML is initialized. Raises NVMLError if it does not answer.

    Args:
        nvml: The module of nvidia-ml-py.
        visible: The value of CUDA_VISIBLE_DEVICES.
    """
    entries = visible_devices(visible, nvml.nvmlDeviceGetCount())
    handles = (_handle(nvml, entry) for entry in entries)
    return [handle for handle in handles if handle is not None]


@contextmanager
def nvml_session(nvml: Any) -> Iterator[None]:
    """A context where NVML can be asked. Raises NVMLError. ``nvml``: the module of nvidia-ml-py."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, entry: int | str) -> Facts | None:
    """Facts of one GPU, with an item ``error`` alone if it does not answer; None if a UUID names none."""
    try:
        handle = _handle(nvml, entry)
        if handle is None:
            return None
        memory = _query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = _query(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        # Rows: corrected and uncorrected errors, whether rows are pending, whether a replacement has failed. Older GPUs
        # replace pages.
        rows = _query(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
        pages = _query(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) if rows is None else rows[2]
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return {
            "name": _decoded(_query(nvml, nvml.nvmlDeviceGetName, handle)),
            "bus": None if pci is None else _decoded(pci.busId),
            "uncorrected": _query(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            # Whether failed memory awaits a reset to be replaced.
            "pending": None if pages is None else bool(pages),
            "used_mb": None if memory is None else round(memory.used / 1e6),
            "memory": None if memory is None else memory.total,
        }
    except nvml.NVMLError as error:
        return {"error": str(error)}


def _handle(nvml: Any, entry: int | str) -> Any | None:
    """The handle of a GPU by its index or UUID; None if the UUID names none."""
    if isinstance(entry, int):
        return nvml.nvmlDeviceGetHandleByIndex(entry)
    if entry.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    # The first digits of a UUID suffice, but for a part of a GPU.
    handles = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
    return next((each for each in handles if (_decoded(nvml.nvmlDeviceGetUUID(each)) or "").startswith(entry)), None)


def _query(nvml: Any, function: Any, *arguments: Any) -> Any:
    """NVML's answer to a query; None if this GPU has no such figure. Raises NVMLError if it does not answer."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in _NO_FIGURE:
            return None
        raise


def _decoded(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --- the kernel log ---------------------------------------------------------------------------------------------


def find_xids(text: str, buses: set[str]) -> list[Facts]:
    """The Xid messages in a kernel log's ``text`` about the GPUs on these PCI ``buses``, or about all if none is given.

    Each kind once for each GPU: ``bus``, ``code``, ``times`` and its last ``line``.
    """
    # NVML and the kernel write the same address with different numbers of digits.
    wanted_buses = {_parse_bus(bus) for bus in buses}
    xids: dict[tuple[str, int], Facts] = {}
    for match in _XID.finditer(text):
        bus, code = match[1], int(match[2])
        if wanted_buses and _parse_bus(bus) not in wanted_buses:
            continue
        xid = xids.setdefault((bus, code), {"bus": bus, "code": code, "times": 0})
        xid.update(times=xid["times"] + 1, line=match[0][:200])
    return list(xids.values())


def _parse_bus(text: str) -> tuple[int, ...] | str:
    """Domain, bus and device of a PCI address, however many digits each is written with."""
    match = _BUS.match(text)
    return tuple(int(part, 16) for part in match.groups()) if match else text


def read_kernel_log(path: Path) -> str:
    """All of /dev/kmsg, which returns one record at each read. Source: dev-kmsg of the kernel's ABI documentation."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    records = []
    try:
        while True:
            try:
                record = os.read(handle, _RECORD)
            except BlockingIOError:  # the end of the log
                break
            except BrokenPipeError:  # the record was overwritten before it was read; the next read returns what follows
                continue
            if not record:
                break
            records.append(record)
    finally:
        os.close(handle)
    return b"".join(records).decode(errors="replace")


# --- the matrix product --------------------------------------------------------------------------------------------


def run_gemm(environ: Mapping[str, str], limit_s: float) -> Facts:
    """Multiply matrices on all GPUs, in a child process.

    Returns ``count`` and ``gpus`` as the child prints them, or ``error``, or ``skip``.
    """
    # -P: do not search the script's directory, whose files could shadow modules of the standard library.
    command = [sys.executable, "-P", __file__, str(limit_s)]
    # The child imports what this process imports, even if the ranks use another Python.
    env = {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = child.communicate(timeout=limit_s)
        ending = f"exit code {child.returncode}" if child.returncode >= 0 else f"signal {-child.returncode}"
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return parse_gemm_output(output.decode(errors="replace"), f"{ending}: {last_line}" if last_line else ending)
    except subprocess.TimeoutExpired as timeout:
        # GPUs that finished in time have printed their lines.
        return parse_gemm_output((timeout.output or b"").decode(errors="replace"), f"no answer within {limit_s:g} s")
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_S)


def parse_gemm_output(output: str, ending: str) -> Facts:
    """The facts in a program's ``output``; ``ending``, how it ended, is the error of GPUs that have no line in it."""
    lines: list[Facts] = []
    for text in output.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    lines = [line for line in lines if isinstance(line, dict)]
    head = next((line for line in lines if "count" in line), None)
    if head is None:
        return {"error": ending}
    if head["count"] == 0 and head.get("built_for") is None:
        return {"skip": "torch is built without CUDA"}
    if head["count"] == 0:
        return {"error": "torch sees no GPU", "count": 0, "gpus": []}
    answers = {line["gpu"]: line for line in lines if "gpu" in line}
    gpus = [answers.get(index, {"gpu": index, "error": ending}) for index in range(head["count"])]
    return {"count": head["count"], "gpus": gpus}


# --- what the child process does -------------------------------------------------------------------------------------

# Powers of two: the sum of that many ones is exact in float16, so that any other result is an error of the hardware.
_GPU_SIZE = 4096
_GPU_ROUNDS = 5
# Products between two clock readings, so that the cost of launching one on a GPU matters little.
_GPU_BATCH = 10

# Held for each line: threads print at the same time.
_output = threading.Lock()


def multiply(device: str, dtype: str, size: int, *, rounds: int, batch: int) -> float:
    """Seconds of a product of matrices of ``size`` x ``size`` ones: the least of ``rounds`` means over ``batch``.

    ``device`` and ``dtype`` are torch's names. Raises ArithmeticError if the product is wrong, RuntimeError if torch
    cannot compute it.
    """
    import torch

    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    product = matrix @ matrix
    # Every element of the product of two matrices of ones is their size.
    if not bool((product == size).all()):
        raise ArithmeticError(f"the product of {size} x {size} ones is wrong")
    # A product on a GPU is only queued when torch returns.
    wait = torch.cuda.synchronize if matrix.is_cuda else lambda _: None
    # The least mean is the one least disturbed by other work on the machine.
    least = float("inf")
    for _ in range(rounds):
        wait(matrix.device)
        began = time.perf_counter()
        for _ in range(batch):
            torch.mm(matrix, matrix, out=product)
        wait(matrix.device)
        least = min(least, (time.perf_counter() - began) / batch)
    return least


def _print_line(line: dict[str, Any]) -> None:
    with _output:
        print(json.dumps(line), flush=True)


def multiply_on_gpus() -> None:
    """Print how many GPUs there are, then try all of them at once: one that hangs delays no other."""
    signal.alarm(int(float(sys.argv[1])) + 1)
    import torch

    def try_gpu(index: int) -> None:
        try:
            properties = torch.cuda.get_device_properties(index)
            seconds = multiply(f"cuda:{index}", "float16", _GPU_SIZE, rounds=_GPU_ROUNDS, batch=_GPU_BATCH)
            speed = 2 * _GPU_SIZE**3 / seconds / 1e12
            hardware = {"name": properties.name, "memory": properties.total_memory}
            _print_line({"gpu": index, **hardware, "ms": round(seconds * 1e3, 4), "tflops": round(speed, 1)})
        except Exception as error:  # noqa: BLE001 (whatever CUDA raises is the finding)
            first_line = str(error).strip().partition("\n")[0]
            _print_line({"gpu": index, "error": f"{type(error).__name__}: {first_line}"})

    count = torch.cuda.device_count()
    _print_line({"count": count, "built_for": torch.version.cuda or torch.version.hip})
    tries = [threading.Thread(target=try_gpu, args=(index,)) for index in range(count)]
    for thread in tries:
        thread.start()
    for thread in tries:
        thread.join()


if __name__ == "__main__":
    multiply_on_gpus()
