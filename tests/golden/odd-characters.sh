#!/bin/bash

# Parameters
#SBATCH --chdir='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID'
#SBATCH --comment='it'"'"'s "quoted" $HOME `x` \\ ünï; # no'
#SBATCH --constraint='[rack1|rack2]&fast'
#SBATCH --cpus-per-task=1
#SBATCH --job-name=odd.characters_0-1-RUN-ID
#SBATCH --licenses='a b:1'
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit/%j_0_log.out'
#SBATCH --propagate=NOFILE,CORE
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
# slurmtrain run RUN-ID, plan 7126c9ab051e
export SLURMTRAIN_RUN_ID=RUN-ID
export SLURMTRAIN_RUN_DIR='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID'
# submitit renames its pickle for the job only after sbatch has returned, and may be killed before: do it here as well
for pickle in '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit'/*.pkl; do
  target='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit'/"${SLURM_JOB_ID:-}_submitted.pkl"
  [ -e "$target" ] || ln "$pickle" "$target" 2>/dev/null || true
done
# whoever can write to a directory above may have put another one here since the job was submitted
for place in '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit' "$target"; do
  if [ -e "$place" ] && [ ! -O "$place" ]; then
    echo "slurmtrain: $place does not belong to the user of this job: nothing of it is run" >&2
    exit 1
  fi
done
unset pickle target place
# srun's own variables stay as Slurm has set them: what a module exports would outrank its options
slurmtrain_slurm=()
for name in $(compgen -A export SLURM_); do slurmtrain_slurm+=("$name=${!name}"); done
# with the umask of the user
SLURMTRAIN_CWD="$PWD"; umask "${SLURMTRAIN_UMASK:-$(umask)}"
# setup of the spec, in the directory of the command. A line that fails ends it, as with set -e, and this script begins
# anew without it: the agents then say what failed, and start no rank. What activate scripts do inside does not count.
slurmtrain_attempt='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/attempts'/"${SLURM_JOB_ID:-}.${SLURM_RESTART_COUNT:-0}"
if [ -z "${SLURMTRAIN_SETUP_FAILED:-}" ]; then
slurmtrain_arguments=("$@") slurmtrain_python="$(type -P python)" slurmtrain_variables=()
for slurmtrain_name in $(compgen -A export PYTHON); do
  slurmtrain_variables+=("$slurmtrain_name=${!slurmtrain_name}")
done
# The agents keep the variables of their Python; ranks get what setup has made of them.
slurmtrain_end_setup() {
  local name each IFS=$' \n'
  trap - ERR
  [[ "$(trap -p EXIT)" != *slurmtrain_failed* ]] || trap - EXIT
  unset -f exit
  unset SLURMTRAIN_SETUP_OF
  export SLURMTRAIN_RANK_VARIABLES=""
  for name in $(compgen -A export PYTHON); do
    export "SLURMTRAIN_RANK_$name=${!name}"
    SLURMTRAIN_RANK_VARIABLES+="$name "
    unset "$name"
  done
  for each in "${slurmtrain_variables[@]}"; do export "$each"; done
  exec >&"$slurmtrain_out" 2>&"$slurmtrain_err" {slurmtrain_out}>&- {slurmtrain_err}>&-
}
slurmtrain_failed() {
  local depth=${#BASH_LINENO[@]} code=$1 line=$2
  set +eu
  # within a function, where it was called
  [ "$depth" -le 2 ] || line=${BASH_LINENO[depth - 2]}
  slurmtrain_end_setup
  export SLURMTRAIN_SETUP_FAILED="$code $((line > slurmtrain_line ? line - slurmtrain_line : 0)) $slurmtrain_attempt"
  cd "$SLURMTRAIN_CWD"
  umask 077
  exec "$BASH" "$0" "${slurmtrain_arguments[@]}"
}
exit() {
  local code="${1:-$?}"
  [ "$BASHPID" != "$$" ] || slurmtrain_failed "$code" 0
  builtin exit "$code"
}
exec {slurmtrain_out}>&1 {slurmtrain_err}>&2
# a job that joins another one's attempt has none of its own
if [ -z "${SLURMTRAIN_EXTENDS:-}" ]; then
  (umask 077; mkdir -p "$slurmtrain_attempt/logs"; : >>"$slurmtrain_attempt/logs/setup-0.log")
  exec >>"$slurmtrain_attempt/logs/setup-0.log" 2>&1
fi
slurmtrain_line=$LINENO
slurmtrain_place="$(umask 077; '/opt/slurm train/bin/python3' -X utf8 -m slurmtrain.runtime.task directory '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1')" &&
  cd "$slurmtrain_place" || slurmtrain_failed 1 0
export SLURMTRAIN_SETUP_OF="$slurmtrain_attempt"
trap 'slurmtrain_code=$?; [ "${BASH_SOURCE[0]}" != "$0" ] || slurmtrain_failed "$slurmtrain_code" "$LINENO"' ERR
# a signal ends this shell: the code is then that of the command before
trap 'slurmtrain_code=$?; case "$slurmtrain_code" in
  0|129|1[3-9]?|2??) :;;
  *) slurmtrain_failed "$slurmtrain_code" 0;; esac' EXIT
slurmtrain_line=$LINENO
export A="it's $HOME" B='ünï "x"'
set +eu
set +o pipefail
slurmtrain_end_setup
[ "$PWD" = "$slurmtrain_place" ] || export SLURMTRAIN_SETUP_DIR="$PWD"
[ "$(type -P python)" = "$slurmtrain_python" ] || export SLURMTRAIN_PYTHON="$(type -P python)"
unset -f slurmtrain_end_setup slurmtrain_failed
unset slurmtrain_{arguments,python,variables,name,out,err,line,place,code}
fi
# the lines after srun evaluate its exit code
set +e
export SLURMTRAIN_UMASK="$(umask)"; umask 077; cd "$SLURMTRAIN_CWD"; unset SLURMTRAIN_CWD
unset ${!SLURM_*} ${!SRUN_*}
for name in "${slurmtrain_slurm[@]}"; do export "$name"; done
unset name slurmtrain_slurm

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit/%j_%t_log.out' --export=ALL --kill-on-bad-exit=1 --wait=120 --cpus-per-task=1 '/opt/slurm train/bin/python3' -X utf8 -u -m slurmtrain.runtime.task '/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/submissions/1/submitit'


# teardown
code=$?
# what setup has left running ends with the job
for signal in TERM TERM KILL; do
  left="$(grep -lszFx SLURMTRAIN_SETUP_OF="$slurmtrain_attempt" /proc/[0-9]*/environ | cut -d/ -f3)"
  [ "$left" ] || break
  kill -s "$signal" $left 2>/dev/null
  sleep 1
done
# an agent without scontrol, as in a container, asks through these files for a requeue, or that there be none
attempt='/slurmtrain-golden/runs of it'"'"'s "odd" $HOME `x` ünï;&/RUN-ID/attempts'/"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
if [ -e "$attempt/requeue" ]; then
  scontrol requeue incomplete "$SLURM_JOB_ID" && code=0
elif [ -e "$attempt/no-requeue" ]; then
  scontrol update JobId="$SLURM_JOB_ID" Requeue=0
fi
exit "$code"