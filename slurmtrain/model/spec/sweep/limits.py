"""Limits of sweeps, where the configuration sets none."""

# Beyond this a sweep is surely a mistake.
MAX_RUNS = 10_000
# Beyond these ``submit`` asks: a number of runs, and GPU-hours.
CONFIRM_RUNS = 1000
CONFIRM_GPU_HOURS = 1000.0
