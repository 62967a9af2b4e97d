"""What most users never need, found through entry points: the rest of the package imports nothing from here."""

# As slurmtrain/cli/__init__.py lists its own: (module, short help) by name, so that --help imports no plug-in.
COMMANDS = {
    "top": ("slurmtrain.plugins.top", "Watch and steer runs on a live page."),
    "export": ("slurmtrain.plugins.export", "Write the model of a checkpoint to a single file."),
    "metrics": ("slurmtrain.plugins.prometheus", "Export the state of all runs to Prometheus."),
    "notify": ("slurmtrain.plugins.notify.looks", "Show the receivers of notifications, and test them."),
    "report": ("slurmtrain.plugins.report", "Write a page about a run, a sweep or many runs."),
    "serve": ("slurmtrain.plugins.serve", "Show live pages of runs, in a browser."),
    "drill": ("slurmtrain.plugins.drill", "Inject faults into runs of a spec, and check that they recover."),
    "scale": ("slurmtrain.plugins.scale", "Run a scaling study of a spec, and print its tables."),
}
