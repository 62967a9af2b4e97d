"""``slurmtrain top``: a live page of all runs."""

# As slurmtrain/cli/__init__.py lists its own: (module, short help) by name.
COMMANDS = {"top": ("slurmtrain.plugins.top.top_command", "Watch and steer runs on a live page.")}
