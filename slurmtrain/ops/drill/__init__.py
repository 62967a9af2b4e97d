"""``drill``: runs of a spec into which faults are injected, compared with an undisturbed one."""
