#!/bin/bash

# Parameters
#SBATCH --array=0-3%2
#SBATCH --chdir=/slurmtrain-golden/project/runs/arrays/ARRAY-ID
#SBATCH --cpus-per-task=1
#SBATCH --job-name=one-node-ARRAY-ID
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/%a/submitit/%A_%a_0_log.out
#SBATCH --propagate=NOFILE,CORE
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain array ARRAY-ID: a link for each element leads to the submission of its run
slurmtrain_job="${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}"
slurmtrain_submission="$(readlink /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/"${SLURM_ARRAY_TASK_ID:-}")"
if [ ! -O /slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements ] || [ ! -d "$slurmtrain_submission" ]; then
  echo "slurmtrain: job $slurmtrain_job has no run of its user's: nothing is run" >&2
  exit 1
fi
export SLURMTRAIN_RUN_DIR="${slurmtrain_submission%/submissions/*}"
export SLURMTRAIN_RUN_ID="${SLURMTRAIN_RUN_DIR##*/}"
cd "$SLURMTRAIN_RUN_DIR" || exit 1
# submitit renames its pickle for the job only after sbatch has returned, and may be killed before: do it here as well
for pickle in /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/*.pkl; do
  target="$slurmtrain_submission"/submitit/"${slurmtrain_job}_submitted.pkl"
  [ -e "$target" ] || ln "$pickle" "$target" 2>/dev/null || true
done
# it may have been renamed in between
[ -e "$target" ] || ln /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/*.pkl "$target" 2>/dev/null || true
# whoever can write to a directory above may have put another one here since the job was submitted
for place in "$slurmtrain_submission"/submitit "$target"; do
  if [ -e "$place" ] && [ ! -O "$place" ]; then
    echo "slurmtrain: $place does not belong to the user of this job: nothing of it is run" >&2
    exit 1
  fi
done
unset pickle target place

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/arrays/ARRAY-ID/submitit/%j_%t_log.out --export=ALL --kill-on-bad-exit=1 --wait=120 --cpus-per-task=1 --output=/slurmtrain-golden/project/runs/arrays/ARRAY-ID/elements/%a/submitit/%A_%a_%t_log.out '/opt/slurm train/bin/python3' -X utf8 -u -m slurmtrain.runtime.task "$slurmtrain_submission"/submitit


# teardown
code=$?
# an agent without scontrol, as in a container, asks through these files for a requeue, or that there be none
attempt="${slurmtrain_submission%/submissions/*}"/attempts/"${slurmtrain_job}.${SLURM_RESTART_COUNT:-0}"
if [ -e "$attempt/requeue" ]; then
  scontrol requeue incomplete "${slurmtrain_job}" && code=0
elif [ -e "$attempt/no-requeue" ]; then
  scontrol update JobId="${slurmtrain_job}" Requeue=0
fi
exit "$code"