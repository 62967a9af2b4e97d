#!/bin/bash

# Parameters
#SBATCH --array=0-1
#SBATCH --chdir=/slurmtrain-golden/project/runs/arrays/ARRAY-ID
#SBATCH --cpus-per-task=1
#SBATCH --job-name=one-node-ARRAY-ID
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/%A_%a_0_log.out
#SBATCH --propagate=NOFILE,CORE
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain array ARRAY-ID: links lead to the submissions of the runs that share the job
slurmtrain_job="${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}"
if [ ! -O /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements ]; then
  echo "slurmtrain: job $slurmtrain_job has no runs of its user's: nothing is run" >&2
  exit 1
fi
# submitit renames its pickle for the job only after sbatch has returned, and may be killed before: do it here as well
for pickle in /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/*.pkl; do
  target=/slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/"${SLURM_ARRAY_TASK_ID:-}.0"/submitit/"${slurmtrain_job}_submitted.pkl"
  [ -e "$target" ] || ln "$pickle" "$target" 2>/dev/null || true
done
# it may have been renamed in between
[ -e "$target" ] || ln /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/*.pkl "$target" 2>/dev/null || true
# whoever can write to a directory above may have put another one here since the job was submitted
for place in /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/"${SLURM_ARRAY_TASK_ID:-}.0"/submitit "$target"; do
  if [ -e "$place" ] && [ ! -O "$place" ]; then
    echo "slurmtrain: $place does not belong to the user of this job: nothing of it is run" >&2
    exit 1
  fi
done
unset pickle target place

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/%j_%t_log.out --export=ALL --kill-on-bad-exit=1 --wait=120 --cpus-per-task=1 --kill-on-bad-exit=0 --wait=0 --output=/slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/%a.%t/submitit/%A_%a_0_log.out '/opt/slurm train/bin/python3' -X utf8 -u -m slurmtrain.runtime.task /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/"${SLURM_ARRAY_TASK_ID:-}.0"/submitit


# teardown
code=$?
# each agent asks through a file for a requeue, or that there be none: one for all, now that none of them trains
again="" open=""
for link in /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/"${SLURM_ARRAY_TASK_ID:-}".*; do
  submission="$(readlink "$link")"
  attempt="${submission%/submissions/*}"/attempts/"${slurmtrain_job}.${SLURM_RESTART_COUNT:-0}"
  if [ -e "$attempt/requeue" ]; then again=yes; elif [ ! -e "$attempt/no-requeue" ]; then open=yes; fi
done
if [ "$again" ]; then
  scontrol requeue incomplete "${slurmtrain_job}" && code=0
elif [ ! "$open" ]; then
  scontrol update JobId="${slurmtrain_job}" Requeue=0
fi
exit "$code"