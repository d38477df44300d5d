#!/usr/bin/env bash
# Run a recipe on a Slurm cluster: submits itself, or runs inside a job of sbatch or salloc. See --help.
# sbatch options on the command line override these.
#SBATCH --job-name=brigade
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail
unset CDPATH # with CDPATH set, cd prints the folder

usage() {
  cat <<'TEXT'
usage: bash launch/slurm.sh [--dry-run] [--doctor] [sbatch options] RECIPE [train.py flags]

  RECIPE   a folder with a train.py: recipes/ddp_resnet, or a copy of it on a file system that all nodes share

  bash launch/slurm.sh -N2 --gpus-per-node=8 --cpus-per-gpu=8 --time=4:00:00 recipes/fsdp_gpt --max-steps 5000
  sbatch -N2 --gpus-per-node=8 --cpus-per-gpu=8 --time=4:00:00 launch/slurm.sh recipes/fsdp_gpt --max-steps 5000
  bash launch/slurm.sh -N1 --gpus-per-node=8 : -N2 --gpus-per-node=4 recipes/ddp_resnet    # a heterogeneous job
  bash launch/slurm.sh --dry-run -N2 recipes/ddp_resnet    # print the commands and stop
  bash launch/slurm.sh --doctor -N2 recipes/ddp_resnet     # in the job, look at its nodes first; see docs/doctor.md

Each node runs launch/torchrun.sh with one process per GPU that Slurm gave to it (2 without GPUs) and its share of the
CPUs. Most clusters give one CPU to a job that asks for none: then this script adds --cpus-per-gpu=4, or
--cpus-per-task=2 without GPUs. With --workers, ask for more.

Slurm signals the job 180 s before its time limit. On that signal, or on preemption, the run saves and the job requeues
itself and resumes in the same folder (<out>/job-<id> without --name), until training is complete or MAX_REQUEUES starts
in a row stop at the same step. A crashed or cancelled job is not requeued.

Environment (launch/site.sh may export it too, see below):
  NPROC_PER_NODE, MAX_RESTARTS, OMP_NUM_THREADS, STAGE_DIR, ACCELERATE_CONFIG   as in launch/torchrun.sh
  MAX_REQUEUES   starts in a row without progress after which the job is not requeued (default: 3)
  SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT, ...   sbatch options, which sbatch reads itself

You may write a file launch/site.sh, which is sourced on the submitting machine and on every node: `module load cuda`,
`source ~/venv/bin/activate`, exports. It may set the array SRUN_OPTIONS; on a cluster with pyxis, for example:
SRUN_OPTIONS=(--container-image=/images/torch.sqsh --container-mounts="$PWD"). If the interpreter comes from a module or
a container, it must `export PYTHON=python`; otherwise this repository's .venv is used.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

say() { # a log on a full disk ends no job
  printf '%s %s\n' "$(date -Is)" "$1" || true
}

asked=
if [[ -n ${SLURM_JOB_ID-} ]]; then # otherwise an early signal ends the job; with a short time limit it comes at once
  trap 'asked=1' USR1 TERM
fi

job=${SLURM_JOB_ID-}
# One task of a job array has the array's own number, and to Slurm that number means all tasks.
[[ -z $job || $job != "${SLURM_ARRAY_JOB_ID-}" ]] || job+=_$SLURM_ARRAY_TASK_ID

about_job() { # one field of this job; for a heterogeneous job, of its first part
  scontrol show job "$job" --oneliner | grep -oPm1 " $1=\K\S+"
}

# sbatch runs a copy of this file from another folder; Slurm knows the original's path.
root=${SLURM_SH_ROOT-}
if [[ -z $root && -n ${SLURM_JOB_ID-} && ${BASH_SOURCE[0]} == */slurm_script ]]; then
  original=$(scontrol show job "$job" --oneliner | grep -oPm1 ' Command=\K(.*?/slurm\.sh|\S+)') # the path may have spaces
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
  trap '' USR1 # it would kill this shell before torchrun handles it; then the clock in common/run/stop.py stops the run
  export NODE_RANK=$SLURM_PROCID NNODES=$SLURM_NTASKS # one task per node, over all parts of a heterogeneous job
  if [[ -z ${NPROC_PER_NODE-} && -n ${SLURM_GPUS_ON_NODE-} ]]; then
    export NPROC_PER_NODE=$SLURM_GPUS_ON_NODE
  fi
  if [[ ${SLURM_CPUS_ON_NODE:-0} -gt 0 && ${NPROC_PER_NODE:-0} -gt $SLURM_CPUS_ON_NODE ]]; then
    say "warning: $(hostname) has $SLURM_CPUS_ON_NODE CPUs for $NPROC_PER_NODE processes: ask for more, as with --cpus-per-gpu=8"
  fi
  if [[ -z ${OMP_NUM_THREADS-} && -n ${SLURM_CPUS_ON_NODE-} && -n ${NPROC_PER_NODE-} ]]; then
    threads=$((SLURM_CPUS_ON_NODE / NPROC_PER_NODE))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
  fi
  exec bash "$root/launch/torchrun.sh" "$@"
fi

# --- the command line ------------------------------------------------------------------------------------

dry_run=
doctor=
sbatch_options=()
recipe=
looked_at=()
while [[ $# -gt 0 && -z $recipe ]]; do
  case $1 in
    -h | --help) usage && exit ;;
    --dry-run) dry_run=1 ;;
    --doctor) doctor=--doctor ;;
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
  fail "no recipe among the arguments (${looked_at[*]-none}): none is a folder with a train.py. The recipes are: ${known//\/ / }"
fi
flags=("$@")
name_given=
for flag in ${flags[@]+"${flags[@]}"}; do
  [[ $flag == --name || $flag == --name=* ]] && name_given=1
done

# Part of the command that a run prints at its end to be resumed with.
config=${ACCELERATE_CONFIG:+ACCELERATE_CONFIG=$(printf '%q' "$ACCELERATE_CONFIG") }

check_flags() { # a typing error must not wait in the queue; train.py needs seconds to see it
  local python=${PYTHON:-python} printed code=0
  if [[ -z ${PYTHON-}${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $root/.venv/bin/python ]]; then # as launch/torchrun.sh does
    python=$root/.venv/bin/python
  fi
  printed=$(ONLY_CHECK_FLAGS=1 PYTHONPATH=$root "$python" "$recipe/train.py" ${flags[@]+"${flags[@]}"} 2>&1) || code=$?
  if [[ $code == 2 ]]; then # otherwise the environment may be on the nodes only, as in a container
    printf '%s\n' "$printed" >&2
    fail "nothing was submitted: correct these flags of train.py. Options of sbatch go before the recipe"
  fi
}

ask_for_cpus() { # the option to add, if neither the command line nor the cluster says how many CPUs a job gets
  local option gpus=
  for option in ${sbatch_options[@]+"${sbatch_options[@]}"}; do
    case $option in
      -c* | --cpus-per-* | --exclusive* | --mincpus* | -n* | --ntasks* | :) return ;; # ":": parts of several kinds
      -G* | --gpus* | --gres=*gpu*) gpus=1 ;;
    esac
  done
  [[ -z ${SBATCH_EXCLUSIVE-}${SBATCH_CPUS_PER_TASK-}${SBATCH_CPUS_PER_GPU-} ]] || return 0
  if [[ -n $gpus${SBATCH_GPUS-}${SBATCH_GPUS_PER_NODE-} ]]; then
    { scontrol show config && scontrol show partition; } 2>/dev/null | grep -q DefCpuPerGPU || echo --cpus-per-gpu=4
  else
    echo "--cpus-per-task=${NPROC_PER_NODE:-2}"
  fi
}

# --- outside a job: submit -------------------------------------------------------------------------------

if [[ -z ${SLURM_JOB_ID-} ]]; then
  cpus=$(ask_for_cpus)
  command=(
    sbatch "--job-name=$(basename "$recipe")" ${cpus:+"$cpus"} ${sbatch_options[@]+"${sbatch_options[@]}"}
    "$root/launch/slurm.sh" ${doctor:+"$doctor"} "$recipe" ${flags[@]+"${flags[@]}"}
  )
  if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}" && echo
    exit
  fi
  kept=() # each task of an array is a run of its own, and continues without the others
  skip=
  for option in ${sbatch_options[@]+"${sbatch_options[@]}"}; do
    case $option in
      --array | -a) skip=1 ;;
      --array=* | -a*) ;;
      *)
        [[ -n $skip ]] || kept+=("$option")
        skip=
        ;;
    esac
  done
  LAUNCHED_AS="${config}bash $(printf '%q ' "$0" ${doctor:+"$doctor"} ${kept[@]+"${kept[@]}"} "$recipe")"
  export SLURM_SH_ROOT=$root
  export LAUNCHED_AS=${LAUNCHED_AS% } # the run prints it at its end, with train.py's flags
  check_flags
  command -v sbatch >/dev/null || fail "sbatch is missing on this machine, so it is not part of a Slurm cluster: without Slurm, use bash launch/torchrun.sh"
  [[ -z $cpus ]] || echo "note: no CPUs were asked for: added $cpus" >&2
  exec "${command[@]}"
fi

# --- in a job: one launcher per node --------------------------------------------------------------------

[[ -n ${SLURM_JOB_NODELIST-} ]] || fail "SLURM_JOB_ID is set without SLURM_JOB_NODELIST, so this is not a job with nodes: unset SLURM_JOB_ID to submit one"
nodes=$SLURM_JOB_NUM_NODES
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address that Slurm itself uses for the node: usually its host name, which may not resolve on every node.
MASTER_ADDR=$(scontrol show node "$head" --oneliner | grep -oP ' NodeAddr=\K\S+')
random() { # so many bytes, as one hexadecimal number
  od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'
}
# A port that nobody can compute, below those that Linux gives out, and free: two jobs can share a node.
MASTER_PORT=
while [[ -z $MASTER_PORT ]] || (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
  MASTER_PORT=$((20000 + 0x$(random 2) % 12768))
done
# srun hands the environment to the nodes, and no other user can read it.
RUN_KEY=$(random 32)
export MASTER_ADDR MASTER_PORT RDZV_ID=$SLURM_JOB_ID RUN_KEY
# Not every version of Slurm sets it. common/run/stop.py stops in time even if the signal does not arrive.
end=$(about_job EndTime || true)
if [[ -z ${SLURM_JOB_END_TIME-} && $end == 20* ]]; then
  SLURM_JOB_END_TIME=$(date -d "$end" +%s)
  export SLURM_JOB_END_TIME
fi
LAUNCHED_AS=${LAUNCHED_AS:-$config$(printf 'bash %q -N%s %q' "$root/launch/slurm.sh" "$nodes" "$recipe")}
export LAUNCHED_AS SLURM_SH_ROOT=$root RUN_DIR_FILE=$PWD/.slurm-$SLURM_JOB_ID.run
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK-} # srun does not read SLURM_CPUS_PER_TASK itself
[[ -n $SRUN_CPUS_PER_TASK ]] || unset SRUN_CPUS_PER_TASK
[[ -n $name_given ]] || flags+=(--name "job-$SLURM_JOB_ID")
where=("--nodes=$nodes" "--ntasks=$nodes")
[[ -z ${SLURM_HET_SIZE-} ]] || where=("--het-group=0-$((SLURM_HET_SIZE - 1))") # all parts of a heterogeneous job
on_nodes=(srun "${where[@]}" --ntasks-per-node=1 ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"})
launch=(bash "$root/launch/slurm.sh" --on-node)
others=1 # they end with the first node that fails; but each node that the doctor looks at says what it has found
[[ ! -f $recipe/around.py ]] || others=0
command=("${on_nodes[@]}" "--kill-on-bad-exit=$others" "${launch[@]}" "$recipe" "${flags[@]}")
examine=(
  env -u ACCELERATE_CONFIG -u STAGE_DIR "${on_nodes[@]}" --kill-on-bad-exit=0 "${launch[@]}" # which are the recipe's own
  "$root/tools/doctor" --out "runs/$(basename "$recipe")" --flags-of-recipe "${flags[@]}"
)
if [[ -n $dry_run ]]; then
  printf 'MASTER_ADDR=%s MASTER_PORT=%s ' "$MASTER_ADDR" "$MASTER_PORT"
  [[ -z $doctor ]] || { printf '%q ' "${examine[@]}" && printf '&& '; }
  printf '%q ' "${command[@]}" && echo
  exit
fi
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $recipe on $SLURM_JOB_NODELIST"

if [[ -n $doctor ]]; then
  code=0
  "${examine[@]}" || code=$?
  [[ $code == 0 ]] || { say "the doctor has found what would break this job, so it has not begun" && exit $code; }
fi
"${command[@]}" &
srun=$!
# Only the batch script gets the signal before the time limit; srun forwards it to every task on every node.
trap 'asked=1; kill -USR1 $srun 2>/dev/null || true' USR1
trap 'asked=1; kill -TERM $srun 2>/dev/null || true' TERM
[[ -z $asked ]] || kill -USR1 $srun
code=0
while true; do
  wait $srun && code=0 || code=$?
  kill -0 $srun 2>/dev/null || break # otherwise a trap has interrupted the wait
done

# --- afterwards: done, failed, or to be requeued --------------------------------------------------------

run=$(cat "$RUN_DIR_FILE" 2>/dev/null || true)
rm -f "$RUN_DIR_FILE"
history=$PWD/.slurm-$SLURM_JOB_ID.starts # the step at which each start ended
if [[ -n $run && -f $run/stopped.json ]]; then # it was asked to stop, and has saved
  step=$(grep -oP '"step": \K\d+' "$run/stopped.json")
  if [[ $step == "$(grep -oP '"of": \K\d+' "$run/stopped.json")" ]]; then # and training is complete
    rm -f "$history"
    exit $((code > 128 ? 0 : code))
  fi
  saved=", saved"
elif [[ -n $asked && $code -gt 128 ]]; then # the signal ended it before it could handle signals, so there was nothing to save
  step=none saved=
else
  rm -f "$history"
  exit $code
fi
# A cancelled job is not requeued.
[[ $(about_job JobState) == RUNNING ]] || exit $code
echo "$step" >>"$history" || say "$history cannot be written to, so starts without progress are not counted"
if [[ $(tail -n "${MAX_REQUEUES:-3}" "$history" | grep -cx "$step") -ge ${MAX_REQUEUES:-3} ]]; then
  fail "${MAX_REQUEUES:-3} starts in a row have stopped at step $step, so the job is not requeued: see ${run:-this log}"
fi
say "stopped at step $step$saved: requeued"
scontrol requeue "$job" # the last command: it ends this job at once
