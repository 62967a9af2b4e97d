#!/bin/bash

# Parameters
#SBATCH --account=team
#SBATCH --chdir=/slurmtrain-golden/project/runs/RUN-ID
#SBATCH --contiguous
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --gpus-per-node=2
#SBATCH --job-name=four-nodes-two-gpus-RUN-ID
#SBATCH --mail-type=END
#SBATCH --mem=65536M
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/RUN-ID/submitit/%j_0_log.out
#SBATCH --partition=spot
#SBATCH --requeue
#SBATCH --reservation=weekend
#SBATCH --signal=USR2@90
#SBATCH --time=2191

# setup
# slurmtrain run RUN-ID, plan 1a9363dc61c9
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR=/slurmtrain-golden/project/runs/RUN-ID
export SLURMTRAIN_RESTART="${SLURM_RESTART_COUNT:-0}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/RUN-ID/submitit/%j_%t_log.out --kill-on-bad-exit=1 --cpus-per-task=16 '/opt/slurm train/bin/python3' -u -m submitit.core._submit /slurmtrain-golden/project/runs/RUN-ID/submitit
