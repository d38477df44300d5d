#!/usr/bin/env bash
# Run a recipe on a Slurm cluster: submits itself, or runs where sbatch or salloc has put it. See --help.
# Options of sbatch on the command line win over these.
#SBATCH --job-name=brigade
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail
unset CDPATH # with it, cd prints where it goes

usage() {
  cat <<'TEXT'
usage: bash launch/slurm.sh [--dry-run] [sbatch options] RECIPE [train.py flags]

  RECIPE   a folder that holds a train.py: recipes/ddp_resnet, or a copy of it, on a file system that all nodes see

  bash launch/slurm.sh -N2 --gpus-per-node=8 --time=4:00:00 recipes/fsdp_gpt --data /data/books --max-steps 5000
  sbatch -N2 --gpus-per-node=8 --time=4:00:00 launch/slurm.sh recipes/fsdp_gpt --data /data/books --max-steps 5000
  bash launch/slurm.sh -N1 --gpus-per-node=8 : -N2 --gpus-per-node=4 recipes/ddp_resnet    # a heterogeneous job
  bash launch/slurm.sh --dry-run -N2 recipes/ddp_resnet    # print the commands and stop

On each node it starts launch/torchrun.sh, with one process per GPU that Slurm gave, else two, and the CPUs that Slurm
gave divided among them. 180 s before the time limit, or asked to leave by Slurm, the run saves and, where it is not
done, the job is queued again and goes on in the same run folder (<out>/job-<id>, if --name is not given). It is not
queued again after a crash, nor when MAX_REQUEUES starts in a row have not got beyond the same step.

Environment (exported in launch/site.sh too, if that exists: see below):
  NPROC_PER_NODE, MAX_RESTARTS, OMP_NUM_THREADS, STAGE_DIR, ACCELERATE_CONFIG   as in launch/torchrun.sh
  MAX_REQUEUES   starts without progress before giving up: default 3
  SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT, ...   options of sbatch, as it reads them itself

launch/site.sh is a file of your own, read on the machine you submit from and on every node: `module load cuda`,
`source ~/venv/bin/activate`, exports. It may set the array SRUN_OPTIONS, such as
SRUN_OPTIONS=(--container-image=/images/torch.sqsh --container-mounts="$PWD") where the cluster has pyxis. Where the
interpreter is a module's or the container's, `export PYTHON=python`: else a .venv of this repository comes first.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

asked=
if [[ -n ${SLURM_JOB_ID-} ]]; then # a signal this early would end the job; with a short time limit it can come at once
  trap 'asked=1' USR1 TERM
fi

job=${SLURM_JOB_ID-}
# One task of an array has the array's number as its own: to Slurm that number means all of them.
[[ -z $job || $job != "${SLURM_ARRAY_JOB_ID-}" ]] || job+=_$SLURM_ARRAY_TASK_ID

about_job() { # one field of this job; of a heterogeneous one, in its first part
  scontrol show job "$job" --oneliner | grep -oPm1 " $1=\K\S+"
}

# sbatch runs a copy of this file from a folder of its own; Slurm knows where the original lies.
root=${SLURM_SH_ROOT-}
if [[ -z $root && -n ${SLURM_JOB_ID-} && ${BASH_SOURCE[0]} == */slurm_script ]]; then
  original=$(scontrol show job "$job" --oneliner | grep -oPm1 ' Command=\K(.*?/slurm\.sh|\S+)') # it may have spaces
  root=$(cd "$(dirname "$original")/.." && pwd)
fi
root=${root:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
SRUN_OPTIONS=()
if [[ -f $root/launch/site.sh ]]; then
  # shellcheck source=/dev/null
  source "$root/launch/site.sh"
fi

# --- on each node, started by srun below -----------------------------------------------------------------

if [[ ${1-} == --on-node ]]; then
  shift
  trap '' USR1 # deadly until torchrun listens; what comes before that, the clock in common/stop.py makes up for
  export NODE_RANK=$SLURM_PROCID NNODES=$SLURM_NTASKS # one task a node, counted over all parts of a heterogeneous job
  if [[ -z ${NPROC_PER_NODE-} && -n ${SLURM_GPUS_ON_NODE-} ]]; then
    export NPROC_PER_NODE=$SLURM_GPUS_ON_NODE
  fi
  if [[ -z ${OMP_NUM_THREADS-} && -n ${SLURM_CPUS_ON_NODE-} && -n ${NPROC_PER_NODE-} ]]; then
    threads=$((SLURM_CPUS_ON_NODE / NPROC_PER_NODE))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
  fi
  exec bash "$root/launch/torchrun.sh" "$@"
fi

# --- the command line ------------------------------------------------------------------------------------

dry_run=
sbatch_options=()
recipe=
looked_at=()
while [[ $# -gt 0 && -z $recipe ]]; do
  case $1 in
    -h | --help) usage && exit ;;
    --dry-run) dry_run=1 ;;
    -*) sbatch_options+=("$1") ;;
    *) # the recipe, or the value of the option before it, as in -N 2
      folder=${1%/}
      folder=${folder%/train.py}
      if [[ -f $folder/train.py ]]; then
        recipe=$(cd "$folder" && pwd)
      elif [[ -f $root/$folder/train.py ]]; then
        recipe=$root/$folder
      else
        sbatch_options+=("$1")
        looked_at+=("$1")
      fi
      ;;
  esac
  shift
done
if [[ -z $recipe ]]; then
  known=$(cd "$root" && printf '%s ' recipes/*/)
  fail "no recipe among the arguments (${looked_at[*]-none}): no such folder holds a train.py. The recipes are: ${known//\/ / }"
fi
flags=("$@")
name_given=
for flag in ${flags[@]+"${flags[@]}"}; do
  [[ $flag == --name || $flag == --name=* ]] && name_given=1
done

# Part of the way to go on that a run tells at its end.
config=${ACCELERATE_CONFIG:+ACCELERATE_CONFIG=$(printf '%q' "$ACCELERATE_CONFIG") }

# --- outside of a job: submit ----------------------------------------------------------------------------

if [[ -z ${SLURM_JOB_ID-} ]]; then
  command=(
    sbatch "--job-name=$(basename "$recipe")" ${sbatch_options[@]+"${sbatch_options[@]}"}
    "$root/launch/slurm.sh" "$recipe" ${flags[@]+"${flags[@]}"}
  )
  if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}" && echo
    exit
  fi
  LAUNCHED_AS="${config}bash $(printf '%q ' "$0" ${sbatch_options[@]+"${sbatch_options[@]}"} "$recipe")"
  export SLURM_SH_ROOT=$root
  export LAUNCHED_AS=${LAUNCHED_AS% } # what the run tells at its end as the way to go on; train.py adds its flags
  command -v sbatch >/dev/null || fail "sbatch is not here: this is no machine of a Slurm cluster. Without one: bash launch/torchrun.sh"
  exec "${command[@]}"
fi

# --- in a job: one launcher per node ---------------------------------------------------------------------

[[ -n ${SLURM_JOB_NODELIST-} ]] || fail "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: this is no allocation of nodes"
nodes=$SLURM_JOB_NUM_NODES
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address by which Slurm itself reaches the node: mostly its host name, but a name need not resolve everywhere.
MASTER_ADDR=$(scontrol show node "$head" --oneliner | grep -oP ' NodeAddr=\K\S+')
# A port of this job's own; two jobs can share a node.
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) RDZV_ID=$SLURM_JOB_ID
# Not all versions of Slurm set it. common/stop.py leaves in time, should the signal fail to arrive.
end=$(about_job EndTime || true)
if [[ -z ${SLURM_JOB_END_TIME-} && $end == 20* ]]; then
  SLURM_JOB_END_TIME=$(date -d "$end" +%s)
  export SLURM_JOB_END_TIME
fi
LAUNCHED_AS=${LAUNCHED_AS:-$config$(printf 'bash %q -N%s %q' "$root/launch/slurm.sh" "$nodes" "$recipe")}
export LAUNCHED_AS SLURM_SH_ROOT=$root RUN_DIR_FILE=$PWD/.slurm-$SLURM_JOB_ID.run
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK-} # srun does not take it over by itself
[[ -n $SRUN_CPUS_PER_TASK ]] || unset SRUN_CPUS_PER_TASK
[[ -n $name_given ]] || flags+=(--name "job-$SLURM_JOB_ID")
where=("--nodes=$nodes" "--ntasks=$nodes")
[[ -z ${SLURM_HET_SIZE-} ]] || where=("--het-group=0-$((SLURM_HET_SIZE - 1))") # all of its parts
command=(
  srun "${where[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1
  ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"} bash "$root/launch/slurm.sh" --on-node "$recipe" "${flags[@]}"
)
if [[ -n $dry_run ]]; then
  printf 'MASTER_ADDR=%s MASTER_PORT=%s ' "$MASTER_ADDR" "$MASTER_PORT"
  printf '%q ' "${command[@]}" && echo
  exit
fi
echo "$(date -Is) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $recipe on $SLURM_JOB_NODELIST"

"${command[@]}" &
srun=$!
# The batch script alone gets the signal before the time limit; srun hands it on to every task on every node.
trap 'asked=1; kill -USR1 $srun 2>/dev/null || true' USR1
trap 'asked=1; kill -TERM $srun 2>/dev/null || true' TERM
[[ -z $asked ]] || kill -USR1 $srun
code=0
while true; do
  wait $srun && code=0 || code=$?
  kill -0 $srun 2>/dev/null || break # else a trap has interrupted the waiting
done

# --- afterwards: done, failed, or to be queued again -----------------------------------------------------

run=$(cat "$RUN_DIR_FILE" 2>/dev/null || true)
rm -f "$RUN_DIR_FILE"
history=$PWD/.slurm-$SLURM_JOB_ID.starts # the step that each start has ended at
if [[ -n $run && -f $run/stopped.json ]]; then # it was asked to leave, and has saved
  step=$(grep -oP '"step": \K\d+' "$run/stopped.json")
  if [[ $step == "$(grep -oP '"of": \K\d+' "$run/stopped.json")" ]]; then # and is done
    rm -f "$history"
    exit $((code > 128 ? 0 : code))
  fi
  saved=", saved"
elif [[ -n $asked && $code -gt 128 ]]; then # ended by the signal, before it could listen: nothing was to be saved
  step=none saved=
else
  rm -f "$history"
  exit $code
fi
# A job that somebody has cancelled stays away.
[[ $(about_job JobState) == RUNNING ]] || exit $code
echo "$step" >>"$history"
if [[ $(tail -n "${MAX_REQUEUES:-3}" "$history" | grep -cx "$step") -ge ${MAX_REQUEUES:-3} ]]; then
  fail "${MAX_REQUEUES:-3} starts in a row have ended at step $step: not queued again. See ${run:-this log}"
fi
echo "$(date -Is) left at step $step$saved: queued again"
scontrol requeue "$job" # the last command: it ends this job at once
