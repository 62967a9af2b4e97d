"""A script that logs two metrics a step to slurmtrain, and notes how long each call of ``run.log`` takes."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import slurmtrain

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--pause", type=float, required=True, help="seconds of a step")
parser.add_argument("--go", type=Path, required=True, help="begin when this file exists")
parser.add_argument("--out", type=Path, required=True)
arguments = parser.parse_args()

took = []
with slurmtrain.session() as run:
    while not arguments.go.exists():
        time.sleep(0.01)
    for step in run.steps(arguments.steps):
        time.sleep(arguments.pause)
        began = time.perf_counter()
        run.log(loss=1.0 / (step + 1), lr=0.1)
        took.append(time.perf_counter() - began)
arguments.out.write_text(json.dumps(took))
