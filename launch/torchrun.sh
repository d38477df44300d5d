#!/usr/bin/env bash
# Start a recipe with torchrun: one process per GPU, else two on the CPU. See --help.
set -euo pipefail
unset CDPATH # with it, cd prints where it goes

usage() {
  cat <<'TEXT'
usage: bash launch/torchrun.sh [--dry-run] [torchrun options] RECIPE [train.py flags]

  RECIPE   a folder that holds a train.py: recipes/ddp_resnet, or a copy of it anywhere

  bash launch/torchrun.sh recipes/ddp_resnet
  NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/ddp_resnet --epochs 5
  bash launch/torchrun.sh recipes/ddp_resnet --help       # the flags of the recipe

Environment (the recipe's launch.env gives defaults):
  NPROC_PER_NODE   processes on this machine: default one per GPU, else 2
  MAX_RESTARTS     how often a failed group of processes is started again: default 0
  OMP_NUM_THREADS  CPU threads per process: default the cores divided by the processes
  PYTHON           the interpreter: default `python` of the active environment, else of the one that `uv sync` has made
  STAGE_DIR        a folder on this machine's own disk: the folder that --data names is copied there once, by the
                   first launch on the machine, and read from there until it changes
  ACCELERATE_CONFIG   of recipes/accelerate_gpt: the file that `accelerate launch --config_file` would get, by its path
                   or, as configs/ddp.yaml, by its place in the recipe's folder
Several machines, the same command on each:
  NNODES           number of machines: default 1; MIN:MAX for a number that may change (elastic)
  NODE_RANK        this machine's number, from 0
  MASTER_ADDR      host name or address of machine 0
  MASTER_PORT      a free port on machine 0, another one for each job: default 29400
  RDZV_ID          name of this job; a machine that comes to the port of another job is refused: default brigade

torchrun options go before RECIPE and are written --option=value; --dry-run prints the command and stops.
Output of rank 0 comes to the terminal; the other ranks write to logs/ in the run's folder.
Exit codes: 0 done, or left by --deadline; 2 refused, with the reason; 128+N asked to leave by signal N, or killed by it;
else a rank failed.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# What the run tells at its end as the way to go on; train.py adds its flags.
launched_as=
for name in NPROC_PER_NODE MAX_RESTARTS OMP_NUM_THREADS NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ID \
  STAGE_DIR ACCELERATE_CONFIG; do
  [[ -z ${!name-} ]] || printf -v launched_as '%s%s=%q ' "$launched_as" "$name" "${!name}"
done
launched_as+=$(printf '%q ' bash "$0")

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=
options=()
while [[ ${1-} == -* ]]; do
  case $1 in
    -h | --help) usage && exit ;;
    --dry-run) dry_run=1 ;;
    *)
      options+=("$1")
      launched_as+=$(printf '%q ' "$1")
      ;;
  esac
  shift
done
[[ $# -gt 0 ]] || { usage >&2; fail "no recipe was named"; }

recipe=${1%/}
shift
export LAUNCHED_AS=${LAUNCHED_AS:-$launched_as$(printf '%q' "$recipe")} # launch/slurm.sh has said it already
recipe=${recipe%/train.py}
[[ -d $recipe || ! -d $root/$recipe ]] || recipe=$root/$recipe # from any folder
if [[ ! -f $recipe/train.py ]]; then
  known=$(cd "$root" && printf '%s ' recipes/*/)
  fail "$recipe holds no train.py; the recipes are: ${known//\/ / }"
fi

# Defaults of the recipe: lines of NAME=value, read and never run; what the environment has, wins.
if [[ -f $recipe/launch.env ]]; then
  while IFS='=' read -r name value || [[ -n $name ]]; do # the last line may lack its end
    [[ $name =~ ^[A-Z_][A-Z0-9_]*$ ]] || continue
    value=${value%%#*}
    [[ -n ${!name-} ]] || export "$name=${value//[[:space:]]/}"
  done <"$recipe/launch.env"
fi

count_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    # Numbers or names of devices; -1 is the usual way to ask for none.
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^[[:space:]]*([0-9]|GPU-|MIG-)' || true
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  else # a container may have the devices without the tool
    compgen -G '/dev/nvidia[0-9]*' | wc -l || true
  fi
}
gpus=$(count_gpus)
export GPUS_ON_NODE=$gpus # torch must see them too, or a rank refuses to train
processes=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 2))}
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$processes is not a number of processes"
threads=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

nodes=${NNODES:-1}
[[ $nodes =~ ^([1-9][0-9]*:)?[1-9][0-9]*$ ]] || fail "NNODES=$nodes is not a number of machines, nor MIN:MAX"
most=${nodes#*:}
if [[ $nodes == 1 ]]; then
  place=(--standalone) # a rendezvous of its own on a free port
else
  [[ -n ${MASTER_ADDR-} ]] || fail "NNODES=$nodes needs MASTER_ADDR, the host name or address of machine 0"
  [[ ${NODE_RANK-} =~ ^[0-9]+$ ]] || fail "NNODES=$nodes needs NODE_RANK, this machine's number from 0 to $((most - 1))"
  ((10#$NODE_RANK < most)) || fail "NODE_RANK=$NODE_RANK is not below NNODES=$nodes"
  # Machine 0 keeps the rendezvous, the others join it in any order; no name of a host has to be recognised.
  host=$((10#$NODE_RANK == 0))
  place=(
    "--nnodes=$nodes" "--rdzv-backend=c10d" "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29400}"
    "--rdzv-id=${RDZV_ID:-brigade}" "--rdzv-conf=is_host=$host,last_call_timeout=5"
  )
fi

# One launcher a machine, so one copy a machine. Its name holds a digest of the names, sizes and times of all files, so
# that data which has changed is copied anew; what was copied is renamed when it is whole.
stage() {
  local data=$1 digest
  [[ -d $data ]] || fail "STAGE_DIR=$STAGE_DIR: --data ${data:-digits} is no folder that could be copied there"
  data=$(cd "$data" && pwd -P)
  digest=$(cd "$data" && find -L . -type f -printf '%P %s %T@\n' | LC_ALL=C sort | sha256sum | cut -c1-16) ||
    fail "STAGE_DIR=$STAGE_DIR: $data cannot be listed"
  staged=$STAGE_DIR/$(basename "$data")-$digest
  mkdir -p "$STAGE_DIR" || fail "STAGE_DIR=$STAGE_DIR cannot be created"
  exec {lock}>"$staged.lock"
  flock "$lock" # another launch on this machine is copying the same
  if [[ ! -d $staged ]]; then
    echo "copying $data to $staged" >&2
    rm -rf "$staged.partial"
    if ! cp -rL "$data" "$staged.partial" || ! mv "$staged.partial" "$staged"; then
      rm -rf "$staged.partial"
      fail "STAGE_DIR=$STAGE_DIR: $data could not be copied there"
    fi
  fi
  exec {lock}>&-
}
unset STAGED_DATA
if [[ -n ${STAGE_DIR-} && -z $dry_run && " $* " != *" --help "* ]]; then
  data=
  for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    [[ ${!i} != --data ]] || data=${!next-}
    [[ ${!i} != --data=* ]] || data=${!i#--data=}
  done
  stage "$data"
  export STAGED_DATA=$staged # common/workloads/splits.py reads this in its place
fi

python=${PYTHON:-python}
if [[ -z ${PYTHON-}${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
fi
# A copied folder brings its own common/ beside train.py, which Python finds first.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
# Each start of the ranks gets a store of its own. The launcher's, which they would share, still holds the addresses of
# the dead ones after a restart, and gloo tries to connect to them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # of the launcher, which tells an error in a sentence of its own
command=(
  "$python" "$root/launch/agent.py" "${place[@]}" "--nproc-per-node=$processes"
  "--max-restarts=${MAX_RESTARTS:-0}" "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
  ${options[@]+"${options[@]}"} "$recipe/train.py" "$@"
)
if [[ -n ${ACCELERATE_CONFIG-} ]]; then
  [[ -f $ACCELERATE_CONFIG || $ACCELERATE_CONFIG == /* ]] || ACCELERATE_CONFIG=$recipe/$ACCELERATE_CONFIG
  command=("$python" "$root/launch/strategy.py" "$ACCELERATE_CONFIG" "${command[@]}")
fi
if [[ -n $dry_run ]]; then
  printf 'OMP_NUM_THREADS=%s PYTHONPATH=%q' "$OMP_NUM_THREADS" "$PYTHONPATH"
  printf ' %q' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
