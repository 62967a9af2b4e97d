"""A script as people have it: logistic regression on points of two classes, which knows nothing of slurmtrain."""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path())
parser.add_argument("--resume", type=Path)
options = parser.parse_args()

random = np.random.default_rng(options.seed)
points = random.normal(size=(400, 2))
classes = (points @ [1.5, -2.0] + random.normal(scale=0.5, size=400) > 0).astype(float)

state = {"weights": np.zeros(2), "step": np.array(0)}
if options.resume:
    state = load_file(options.resume)
weights = state["weights"]
for step in range(int(state["step"]) + 1, options.steps + 1):
    predicted = 1 / (1 + np.exp(-(points @ weights)))
    weights = weights - options.lr * points.T @ (predicted - classes) / len(points)
    loss = -np.mean(classes * np.log(predicted) + (1 - classes) * np.log(1 - predicted))
    accuracy = np.mean((predicted > 0.5) == classes)
    print(f"step {step} loss={loss:.4f} acc={accuracy:.3f}", flush=True)
    if step % 10 == 0:
        options.out.mkdir(exist_ok=True)
        save_file({"weights": weights, "step": np.array(step)}, options.out / "new.tmp")
        (options.out / "new.tmp").rename(options.out / f"model-{step}.safetensors")
