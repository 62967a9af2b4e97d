#!/bin/bash

# Parameters
#SBATCH --chdir='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID'
#SBATCH --comment='it'"'"'s "quoted" $HOME `x` \ ünï; # no'
#SBATCH --constraint='[rack1|rack2]&fast'
#SBATCH --cpus-per-task=1
#SBATCH --job-name=odd.characters_0-1-RUN-ID
#SBATCH --licenses='a b:1'
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submitit/%j_0_log.out'
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain run RUN-ID, plan 7812658e724c
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID'
export SLURMTRAIN_RESTART="${SLURM_RESTART_COUNT:-0}"
# setup of the spec
export A="it's $HOME" B='ünï "x"'

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submitit/%j_%t_log.out' --kill-on-bad-exit=1 --cpus-per-task=1 '/opt/slurm train/bin/python3' -u -m submitit.core._submit '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submitit'
