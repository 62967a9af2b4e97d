"""``drill``: injects faults into runs of a spec, and compares them with an undisturbed run."""
