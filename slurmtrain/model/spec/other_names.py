"""What other programs call keys of a spec: for a hint to who writes one of these names."""

_KEYS = {
    "command": ("cmd", "script", "run", "entrypoint", "program"),
    "params": ("args", "arguments", "parameters", "hyperparameters", "hparams"),
    "name": ("job_name", "job-name", "jobname"),
    "env": ("environment", "environ", "env_vars", "variables"),
    "setup": ("modules", "prolog", "prologue", "setup_commands"),
    "workdir": ("cwd", "chdir", "directory", "working_dir", "working_directory"),
    "sweep": ("grid", "sweeps", "array"),
    "slurm": ("sbatch", "sbatch_options"),
    "slurm.partition": ("queue", "partitions"),
    "resources.nodes": ("node", "num_nodes", "n_nodes", "nnodes"),
    "resources.gpus_per_node": ("gpu", "gpus", "num_gpus", "n_gpus", "ngpus", "gpus_per_task", "gres"),
    "resources.procs_per_node": (
        "procs", "processes", "tasks", "ntasks", "nproc", "nproc_per_node", "tasks_per_node", "ntasks_per_node",
    ),
    "resources.cpus_per_proc": ("cpu", "cpus", "cores", "num_cpus", "cpus_per_task", "cpus-per-task"),
    "resources.mem": ("memory", "ram", "mem_per_node"),
    "resources.time": ("walltime", "timeout", "time_limit", "timelimit", "time-limit"),
    "strategy": ("parallel", "parallelism", "parallelize", "ddp", "fsdp", "hsdp"),
    "strategy.mixed_precision": ("precision", "amp", "param_dtype"),
    "resources.accumulation": ("gradient_accumulation", "gradient_accumulation_steps", "accumulate_grad_batches"),
    "requeue.max_failures": ("retries", "max_retries", "max_restarts"),
}  # fmt: skip

OTHER_NAMES = {name: tuple(key.split(".")) for key, names in _KEYS.items() for name in names}
