"""Logistic regression on scikit-learn's handwritten digits, in plain torch: an example of an existing script."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits


def main() -> None:
    """Train, and save checkpoints without slurmtrain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    model = torch.nn.Linear(64, 10)
    first = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"]
        print(f"resumed from {args.resume.name}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    for step in range(first, args.steps):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= args.lr * parameter.grad
        time.sleep(args.seconds_per_step)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            # Renamed once it is complete: a file that a kill has cut short must not match checkpoint.glob.
            unfinished = args.out / f"ckpt-{step + 1}.pt.tmp"
            torch.save({"model": model.state_dict(), "step": step + 1}, unfinished)
            unfinished.replace(args.out / f"ckpt-{step + 1}.pt")
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
