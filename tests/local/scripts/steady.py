"""A script without slurmtrain and without torch: it counts, a line every 20 ms, until it is ended."""

import itertools
import threading

for number in itertools.count(1):
    print(f"line {number}", flush=True)
    threading.Event().wait(0.02)
