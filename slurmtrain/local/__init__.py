"""The local executor: runs on this machine, through submitit's LocalExecutor."""
