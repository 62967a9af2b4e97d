"""``slurmtrain metrics`` exports the state of all runs to Prometheus."""

# As slurmtrain/cli/__init__.py lists its own: (module, short help) by name.
COMMANDS = {"metrics": ("slurmtrain.plugins.prometheus.metrics_command", "Export the state of all runs to Prometheus.")}
