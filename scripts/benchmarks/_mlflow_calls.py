"""Log two metrics a step to MLflow directly, and print how long the calls of each step took, in seconds."""

from __future__ import annotations

import sys
import time

import mlflow
from mlflow.entities import Metric

WAY, URI, RUN, STEPS, PAUSE = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
BATCH = 1000

client = mlflow.MlflowClient(tracking_uri=URI)
pending: list[Metric] = []
futures = []


def log(step: int) -> None:
    """Log the metrics of a step in this process's way."""
    now = int(time.time() * 1000)
    metrics = [Metric("loss", 1.0 / (step + 1), now, step), Metric("lr", 0.1, now, step)]
    if WAY == "log_metric":
        for metric in metrics:
            client.log_metric(RUN, metric.key, metric.value, metric.timestamp, metric.step)
    elif WAY == "log_batch":
        client.log_batch(RUN, metrics=metrics)
    elif WAY == "asynchronous":
        futures.append(client.log_batch(RUN, metrics=metrics, synchronous=False))
    else:
        pending.extend(metrics)
        if len(pending) >= BATCH:
            client.log_batch(RUN, metrics=pending)
            pending.clear()


all_began = time.perf_counter()
for number in range(STEPS):
    time.sleep(PAUSE)
    began = time.perf_counter()
    log(number)
    print(time.perf_counter() - began, flush=True)
for future in futures:
    future.wait()
print("all", time.perf_counter() - all_began, flush=True)
