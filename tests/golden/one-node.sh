#!/bin/bash

# Parameters
#SBATCH --chdir=/slurmtrain-golden/project/runs/RUN-ID
#SBATCH --cpus-per-task=1
#SBATCH --job-name=one-node-RUN-ID
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/RUN-ID/submitit/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain run RUN-ID, plan 5e439e71ffce
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR=/slurmtrain-golden/project/runs/RUN-ID
export SLURMTRAIN_RESTART="${SLURM_RESTART_COUNT:-0}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/RUN-ID/submitit/%j_%t_log.out --kill-on-bad-exit=1 --cpus-per-task=1 '/opt/slurm train/bin/python3' -u -m submitit.core._submit /slurmtrain-golden/project/runs/RUN-ID/submitit
