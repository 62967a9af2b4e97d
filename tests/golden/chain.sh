#!/bin/bash

# Parameters
#SBATCH --chdir=/slurmtrain-golden/project/runs/RUN-ID
#SBATCH --cpus-per-task=1
#SBATCH --dependency=afterany:17:18_1,singleton
#SBATCH --exclude=node7
#SBATCH --job-name=one-node-RUN-ID
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit/%j_0_log.out
#SBATCH --propagate=NOFILE,CORE
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain run RUN-ID, plan ba9fac617abb
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR=/slurmtrain-golden/project/runs/RUN-ID
# submitit renames its pickle for the job only after sbatch has returned, and may be killed before: do it here as well
for pickle in /slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit/*.pkl; do
  target=/slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit/"${SLURM_JOB_ID:-}_submitted.pkl"
  [ -e "$target" ] || ln "$pickle" "$target" 2>/dev/null || true
done
# whoever can write to a directory above may have put another one here since the job was submitted
for place in /slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit "$target"; do
  if [ -e "$place" ] && [ ! -O "$place" ]; then
    echo "slurmtrain: $place does not belong to the user of this job: nothing of it is run" >&2
    exit 1
  fi
done
unset pickle target place

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit/%j_%t_log.out --export=ALL --kill-on-bad-exit=1 --wait=120 --cpus-per-task=1 '/opt/slurm train/bin/python3' -X utf8 -u -m slurmtrain.runtime.task /slurmtrain-golden/project/runs/RUN-ID/submissions/2/submitit


# teardown
code=$?
# an agent without scontrol, as in a container, asks through these files for a requeue, or that there be none
attempt=/slurmtrain-golden/project/runs/RUN-ID/attempts/"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
if [ -e "$attempt/requeue" ]; then
  scontrol requeue incomplete "$SLURM_JOB_ID" && code=0
elif [ -e "$attempt/no-requeue" ]; then
  scontrol update JobId="$SLURM_JOB_ID" Requeue=0
fi
exit "$code"