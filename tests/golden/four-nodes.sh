#!/bin/bash

# Parameters
#SBATCH --account=team
#SBATCH --chdir=/slurmtrain-golden/project/runs/RUN-ID
#SBATCH --comment='it'"'"'s $HOME'
#SBATCH --contiguous
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --gpus-per-node=2
#SBATCH --job-name=four-nodes-two-gpus-RUN-ID
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mail-type=END
#SBATCH --mem=65536M
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit/%j_0_log.out
#SBATCH --partition=spot
#SBATCH --propagate=NOFILE,CORE
#SBATCH --requeue
#SBATCH --reservation=weekend
#SBATCH --signal=USR2@90
#SBATCH --time=2191

# setup
# slurmtrain run RUN-ID, plan e6dee8678975
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR=/slurmtrain-golden/project/runs/RUN-ID
# submitit renames its pickle for the job only after sbatch has returned, and may be killed before: do it here as well
for pickle in /slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit/*.pkl; do
  target=/slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit/"${SLURM_JOB_ID:-}_submitted.pkl"
  [ -e "$target" ] || ln "$pickle" "$target" 2>/dev/null || true
done
# whoever can write to a directory above may have put another one here since the job was submitted
for place in /slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit "$target"; do
  if [ -e "$place" ] && [ ! -O "$place" ]; then
    echo "slurmtrain: $place does not belong to the user of this job: nothing of it is run" >&2
    exit 1
  fi
done
unset pickle target place
# the first node's addresses and port, for all nodes
invitation="$('/opt/slurm train/bin/python3' -X utf8 -m slurmtrain.runtime.preflight.ports)" && eval "$invitation"
unset invitation

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit/%j_%t_log.out '--prolog=it'"'"'s $HOME' --quiet --export=ALL --kill-on-bad-exit=1 --wait=120 --cpus-per-task=16 '/opt/slurm train/bin/python3' -X utf8 -u -m slurmtrain.runtime.task /slurmtrain-golden/project/runs/RUN-ID/submissions/1/submitit


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