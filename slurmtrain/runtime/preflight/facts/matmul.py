"""A matrix product on every GPU that a process can see, run as a child process.

A CUDA context holds GPU memory for as long as its process lives, so the node agent, which lives as long as the run,
never makes one. ``python matmul.py SECONDS`` prints ``{"count": GPUs, "built_for": version or null}``, then a line for
each GPU as soon as it is done: ``{"gpu": index, "name", "memory", "ms", "tflops"}`` or ``{"gpu": index, "error":
text}``. After SECONDS it is killed by its own alarm, in case its parent is gone.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any

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
