"""How many samples fit into the memory of a rank's GPU at once, by what its steps take."""

from __future__ import annotations

import torch

from slurmtrain.model.data.microbatches import samples_that_fit


class SampleMemory:
    """Measures single steps."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the rank computes; only the memory of a GPU is measured."""
        self._device = device
        self._before = 0
        # The most samples that a measured step had at once.
        self._samples = 0
        self._most: int | None = None

    @property
    def most(self) -> int | None:
        """How many samples fit; None on the CPU, or as long as that is unknown."""
        return self._most

    def begin(self) -> None:
        """Begin a step that is measured."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)

    def end(self, samples: int) -> None:
        """End the step, which had so many ``samples`` at once, at least one."""
        if self._device.type != "cuda" or samples < self._samples:
            return
        self._samples = samples
        _, total = torch.cuda.mem_get_info(self._device)
        self._most = samples_that_fit(
            total=total,
            before=self._before,
            peak=torch.cuda.max_memory_allocated(self._device),
            samples=samples,
        )
