"""``slurmtrain drill`` injects faults into runs of a spec, and compares them with an undisturbed run."""

# As slurmtrain/cli/__init__.py lists its own: (module, short help) by name.
COMMANDS = {
    "drill": (
        "slurmtrain.plugins.drill.drill_command",
        "Inject faults into runs of a spec, and check that they recover.",
    )
}
