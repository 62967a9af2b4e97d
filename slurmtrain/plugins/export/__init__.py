"""``slurmtrain export`` writes the model of a checkpoint to a single file."""

# As slurmtrain/cli/__init__.py lists its own: (module, short help) by name.
COMMANDS = {"export": ("slurmtrain.plugins.export.export_command", "Write the model of a checkpoint to a single file.")}
