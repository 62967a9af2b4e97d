"""Train a byte-level GPT on the source of Python's standard library, distributed as the spec's ``strategy`` says.

Works as a slurmtrain run, under torchrun, and as a plain ``python train.py``. The batch of a step is the same on any
number of processes, so that the losses are, too.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import slurmtrain

PARAMS = {
    "steps": 300, "batch_size": 32, "context": 64, "width": 64, "heads": 4, "layers": 2, "lr": 0.003, "seed": 0,
    "seconds_per_step": 0.0,
}  # fmt: skip
BYTES = 256
# As much text as is read: some standard libraries are larger than others.
TEXT_BYTES = 2_000_000


def standard_library() -> Tensor:
    """The modules of the standard library, one after the other: bytes (n,) as whole numbers from 0 to 255."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(text: Tensor, step: int, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes (size, context) of the whole batch of a step, and those that follow each of them."""
    numbers = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (size, 1), generator=numbers)
    places = starts + torch.arange(context)
    return text[places], text[places + 1]


class Block(nn.Module):
    """Attention to earlier bytes, then two linear layers, each added to its input (batch, context, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` after this block."""
        # Head by head, so that a division of the features among processes divides the heads.
        heads = self.attention(self.before_attention(x)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(-2))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """What each byte of a text is, and where it is in it."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        """Vectors (batch, context, width) of a ``text`` (batch, context)."""
        return self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Predicts the next byte at each place of a text."""

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = Embedding(width, context)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))
        self.heads = heads

    def forward(self, text: Tensor) -> Tensor:
        """The logits (batch, context, 256) of the bytes that follow those of ``text`` (batch, context)."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def pipeline_parts(self) -> list[str]:
        """What ``strategy: pipeline`` divides among processes: modules that are applied one after the other."""
        return ["embedding", *(f"blocks.{index}" for index in range(len(self.blocks))), "head"]

    def tensor_plan(self, size: int) -> dict[str, str]:
        """How ``strategy: tensor`` divides the layers among ``size`` processes. Raises ValueError for the heads."""
        if self.heads % size:
            raise ValueError(f"{self.heads} heads cannot be divided among {size} processes")
        return {
            "embedding.bytes": "rowwise", "embedding.places": "rowwise",
            "blocks.*.before_attention": "sequence_parallel", "blocks.*.mlp.0": "sequence_parallel",
            "blocks.*.attention": "colwise", "blocks.*.projection": "rowwise",
            "blocks.*.mlp.1": "colwise", "blocks.*.mlp.3": "rowwise",
            "head.0": "sequence_parallel", "head.1": "colwise_rep",
        }  # fmt: skip


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def main() -> None:
    """Train, and print the loss of the whole batch."""
    with slurmtrain.session(params=PARAMS) as run:
        params = run.params
        torch.manual_seed(params["seed"])
        gpt = Gpt(params["width"], params["heads"], params["layers"], params["context"])
        # Forward and backward, with an addition and a multiplication each: 6 operations for a parameter and a byte.
        operations = 6 * sum(parameter.numel() for parameter in gpt.parameters()) * params["context"]
        run.measure(flops_per_sample=operations, tokens_per_sample=params["context"])
        model = run.parallelize(gpt)
        optimizer = run.optimizer(torch.optim.AdamW, model.parameters(), lr=params["lr"])
        text = standard_library()
        run.checkpoint(model=model, optimizer=optimizer)

        for step in run.steps(params["steps"]):
            whole = batch_of(text, step, params["batch_size"], params["context"], params["seed"])
            share = (part.to(run.device) for part in run.share(*whole))
            optimizer.zero_grad()
            mean = run.forward_backward(model, loss_of, *share)
            optimizer.step()
            mean *= run.weight
            dist.all_reduce(mean)
            mean /= run.world_size
            run.log(loss=mean)
            if run.rank == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {mean.item():.4f}", flush=True)
            time.sleep(params["seconds_per_step"])


if __name__ == "__main__":
    main()
