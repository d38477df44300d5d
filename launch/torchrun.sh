#!/usr/bin/env bash
# Start a recipe with torchrun: one process per GPU, or two on the CPU. See --help.
set -euo pipefail
unset CDPATH # with CDPATH set, cd prints the folder
trap 'exit 130' INT # else bash continues where a command of its own has not died of it

usage() {
  cat <<'TEXT'
usage: bash launch/torchrun.sh [--dry-run] [torchrun options] RECIPE [train.py flags]

  RECIPE   a folder that holds a train.py: recipes/ddp_resnet, or a copy of it anywhere

  bash launch/torchrun.sh recipes/ddp_resnet
  NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/ddp_resnet --epochs 5
  bash launch/torchrun.sh recipes/ddp_resnet --help       # the flags of the recipe

Environment (the recipe's launch.env gives defaults):
  NPROC_PER_NODE   processes on this machine (default: one per GPU; 2 without GPUs)
  MAX_RESTARTS     times to start all processes again after a failure (default: 0)
  OMP_NUM_THREADS  CPU threads per process (default: cores divided by processes)
  NUMA_BINDING     where ranks run, as torchrun's --numa-binding; empty for anywhere (default: node with several GPUs,
                   which is beside the rank's GPU, if numactl is installed and the machine says where its GPUs are)
  PYTHON           the interpreter (default: `python` of the active environment, else of the .venv of `uv sync`)
  STAGE_DIR        a folder on this machine's own disk: the first launch copies the --data folder there, and all launches
                   read the copy until the data changes
  TRUST_OPEN_FOLDERS   group: trust the members of a folder's group, and let them write; 1: take any folder, as on SMB,
                   FUSE or WSL's drvfs, where owner and mode say nothing; only where no other user has access
  ACCELERATE_CONFIG   for recipes/accelerate_gpt: a config file of Accelerate, as for `accelerate launch --config_file`;
                   a relative path may start at the recipe's folder, such as configs/ddp.yaml
Several machines, the same command on each:
  NNODES           number of machines (default: 1), or MIN:MAX if it may change during the run (elastic)
  NODE_RANK        number of this machine, from 0
  MASTER_ADDR      host name or address of machine 0
  MASTER_PORT      a free port on machine 0, a different one for each job (default: 29400)
  RDZV_ID          name of the job (default: brigade); a machine of another job at the same port is refused
  RUN_KEY          a secret of this job in hexadecimal digits, the same on each machine: whoever does not know it cannot
                   take part. Make one with `openssl rand -hex 32`

torchrun options go before RECIPE and are written --option=value; --dry-run prints the command and stops.
Rank 0 prints to the terminal; the other ranks write to logs/ in the run's folder.
Exit codes: 0 done, or stopped by --deadline or --stop-after; 2 refused, with the reason; 128+N stopped or killed by
signal N; any other code: a rank failed.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# The command that the run prints at its end to be resumed with; train.py adds its flags.
launched_as=
for name in NPROC_PER_NODE MAX_RESTARTS OMP_NUM_THREADS NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ID \
  NUMA_BINDING STAGE_DIR ACCELERATE_CONFIG TRUST_OPEN_FOLDERS; do
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
[[ $# -gt 0 ]] || { usage >&2; fail "name a recipe, such as recipes/ddp_resnet"; }

recipe=${1%/}
shift
export LAUNCHED_AS=${LAUNCHED_AS:-$launched_as$(printf '%q' "$recipe")} # launch/slurm.sh may have set it
recipe=${recipe%/train.py}
[[ -d $recipe || ! -d $root/$recipe ]] || recipe=$root/$recipe # works from any folder
if [[ ! -f $recipe/train.py ]]; then
  known=$(cd "$root" && printf '%s ' recipes/*/)
  fail "$recipe has no train.py; the recipes are: ${known//\/ / }"
fi

# The recipe's defaults: lines of NAME=value, which are read and never run. The environment overrides them.
if [[ -f $recipe/launch.env ]]; then
  while IFS='=' read -r name value || [[ -n $name ]]; do # the last line may lack a newline
    [[ $name && $name != \#* ]] || continue
    [[ $name =~ ^[A-Z_][A-Z0-9_]*$ ]] || fail "$recipe/launch.env: '$name' is no line of NAME=value or comment"
    value=${value%%#*}
    [[ -n ${!name-} ]] || export "$name=${value//[[:space:]]/}"
  done <"$recipe/launch.env"
fi

count_gpus() { # that torch will see
  local visible=${CUDA_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${ROCR_VISIBLE_DEVICES-all}}} listed='' device devices
  if [[ $visible != all ]]; then
    # Numbers or names of devices. As CUDA does, this stops at the first that is neither, such as -1, and takes none of
    # a list that has one twice.
    IFS=', ' read -ra devices <<<"$visible"
    for device in "${devices[@]}"; do
      [[ $device =~ ^([0-9]|GPU-|MIG-) ]] || break
      [[ $'\n'$listed != *$'\n'"$device"$'\n'* ]] || { listed='' && break; }
      listed+=$device$'\n'
    done
  else
    listed=$(nvidia-smi -L 2>/dev/null | grep -E '^GPU|MIG' || true)
    # A container may have GPUs without nvidia-smi. Linux lists AMD's; those that a container may not use are unreadable.
    listed=${listed:-$(compgen -G '/dev/nvidia[0-9]*' ||
      grep -ls '^simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/properties || true)}
  fi
  if [[ $listed == *MIG* ]]; then # of parts of GPUs, CUDA gives one to a process, and NCCL connects none
    [[ $(grep -c MIG <<<"$listed") == 1 ]] || echo "note: of several parts of GPUs (MIG), one is used" >&2
    echo 1
  else
    grep -c . <<<"$listed" || true
  fi
}
gpus=$(count_gpus)
if ((gpus == 0)) && [[ ${CUDA_VISIBLE_DEVICES-} =~ [0-9] && ${CUDA_VISIBLE_DEVICES-} != -1 ]]; then
  echo "note: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES gives CUDA no GPU: it begins with no device, or has one twice" >&2
fi
export GPUS_ON_NODE=$gpus # a rank refuses to train if torch sees none of them
processes=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 2))}
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$processes must be a number of processes, such as 2"
threads=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

nodes=${NNODES:-1}
[[ $nodes =~ ^([1-9][0-9]*:)?[1-9][0-9]*$ ]] || fail "NNODES=$nodes must be a number of machines, such as 2, or MIN:MAX"
most=${nodes#*:}
if [[ $nodes == 1 ]]; then
  place=(--rdzv-backend=brigade --rdzv-endpoint=here) # within the launcher: nothing listens
else
  [[ -n ${MASTER_ADDR-} ]] || fail "NNODES=$nodes needs MASTER_ADDR, the host name or address of machine 0"
  [[ ${NODE_RANK-} =~ ^[0-9]+$ ]] || fail "NNODES=$nodes needs NODE_RANK, this machine's number from 0 to $((most - 1))"
  ((10#$NODE_RANK < most)) || fail "NODE_RANK=$NODE_RANK must be below NNODES=$nodes: machines are numbered from 0"
  [[ ${MASTER_PORT:-29400} =~ ^[0-9]+$ ]] || fail "MASTER_PORT=$MASTER_PORT must be a port, such as 29400"
  [[ ${RUN_KEY-} =~ ^[0-9a-fA-F]{32,}$ ]] || fail "NNODES=$nodes needs RUN_KEY, a secret of this job that is the same on each machine: make one with 'export RUN_KEY=\$(openssl rand -hex 32)'"
  # Machine 0 hosts the rendezvous, the others join in any order. No machine needs to recognise its own host name.
  host=$((10#$NODE_RANK == 0))
  place=(
    "--nnodes=$nodes" "--rdzv-backend=brigade" "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29400}"
    "--rdzv-id=${RDZV_ID:-brigade}" "--rdzv-conf=is_host=$host,last_call_timeout=5"
  )
fi

# One launcher per machine, so one copy per machine. The copy's name has a digest of all files' names, sizes and times,
# so changed data is copied again. A copy gets its final name when it is complete.
stage() {
  local data=$1 digest
  [[ -d $data ]] || data=${data%@*} # without the split to validate on
  [[ -d $data ]] || data=${data%:*} # and the configuration
  [[ -d $data ]] || fail "STAGE_DIR=$STAGE_DIR copies the folder of --data, and --data ${1:-digits} is not a folder: unset STAGE_DIR"
  data=$(cd "$data" && pwd -P)
  digest=$(cd "$data" && find -L . -type f -printf '%P %s %T@\n' | LC_ALL=C sort | sha256sum | cut -c1-16) ||
    fail "STAGE_DIR=$STAGE_DIR: $data cannot be read"
  staged=$STAGE_DIR/$(basename "$data")-$digest
  mkdir -p "$STAGE_DIR" || fail "STAGE_DIR=$STAGE_DIR cannot be created"
  exec {lock}>"$staged.lock"
  flock "$lock" # waits while another launch on this machine makes the same copy
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
asks_help=
for word in "$@"; do
  [[ $word != -h && $word != --help ]] || asks_help=1
done

unset STAGED_DATA
if [[ -n ${STAGE_DIR-} && -z $dry_run$asks_help ]]; then
  data=
  for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    [[ ${!i} != --data ]] || data=${!next-}
    [[ ${!i} != --data=* ]] || data=${!i#--data=}
  done
  stage "$data"
  export STAGED_DATA=$staged # common/workloads/splits.py reads this folder instead
fi

# torch.compile reads pickles from its cache, whose usual folder another user can have made first.
cache=${TMPDIR:-/tmp}/torchinductor_$(id -un 2>/dev/null || id -u)
if [[ -z ${TORCHINDUCTOR_CACHE_DIR-} && -z $dry_run ]]; then
  is_ours() { [[ -O $1 && ! -L $1 && -z $(find "$1" -maxdepth 0 -perm /022) ]]; }
  mkdir -m 700 "$cache" 2>/dev/null || true
  for folder in "$cache" "$cache".??????; do # or one that an earlier launch has made
    ! is_ours "$folder" || break
  done
  is_ours "$folder" || folder=$(mktemp -d "$cache.XXXXXX" || true)
  export TORCHINDUCTOR_CACHE_DIR=$folder # empty: torch's usual folder
fi

python=${PYTHON:-python}
if [[ -z ${PYTHON-}${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
fi
# A copied recipe has its own common/ beside train.py, which Python finds first.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export PYTHONBREAKPOINT=${PYTHONBREAKPOINT-launch.debugger.explain} # a rank has no terminal to read from
# Each start of the ranks gets its own store. The launcher's store, which they would share otherwise, still has the
# addresses of dead ranks after a restart, and gloo would try to connect to those.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-FATAL} # the launcher explains errors itself
if ((gpus > 0)) && [[ -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then # the older name of the same variable
  # Blocks of GPU memory that can grow: sizes that change do not leave gaps that nothing fits into.
  export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi
memory=()
if ((gpus == 0)) && [[ -z ${MALLOC_TRIM_THRESHOLD_-}${MALLOC_MMAP_THRESHOLD_-} && ${GLIBC_TUNABLES-} != *malloc* ]]; then
  # Else glibc gives memory back to Linux at the end of a step, and takes it again, page by page, in the next. Bytes.
  # Whoever sets the first fixes the second, which would have grown to this value.
  memory=(MALLOC_TRIM_THRESHOLD_=$((2 ** 30)) MALLOC_MMAP_THRESHOLD_=$((2 ** 25)))
  export "${memory[@]}"
fi

# A flag is in doubt if no field of that name stands in the recipe's folder or in common/.
in_doubt() {
  local shared=$root/common fields word name
  grep -q 'cli\.parse(' "$recipe/train.py" || return 1 # it need not know ONLY_CHECK_FLAGS, and would train
  [[ ! -d $recipe/common ]] || shared=$recipe/common
  fields=$(grep -rhoE --include='*.py' '^    [a-z][a-z0-9_]*: ' "$recipe"/*.py "$shared") || return 1
  for word in "$@"; do
    [[ $word == --* ]] || continue
    name=${word#--} && name=${name%%=*} && name=${name//-/_}
    [[ $name == config || $fields == *"    $name: "* || $fields == *"    ${name#no_}: "* ]] || return 0
  done
  return 1
}

# One process, which is no rank of another job, answers --help, and refuses a wrong flag before torchrun is imported. A
# flag that is not in doubt costs nothing. Several machines meet first: another one may have the right flags.
alone=(env -u RANK -u WORLD_SIZE -u LOCAL_RANK "$python" "$recipe/train.py" "$@")
if [[ -z $dry_run && ! -f $recipe/around.py ]]; then
  [[ -z $asks_help ]] || exec "${alone[@]}"
  if [[ $nodes == 1 ]] && in_doubt "$@"; then
    code=0
    refusal=$(ONLY_CHECK_FLAGS=1 "${alone[@]}" 2>&1 >/dev/null) || code=$?
    if [[ $code == 2 ]]; then # otherwise the ranks show what is wrong
      printf '%s\n' "$refusal" >&2
      exit 2
    fi
  fi
fi

# Whether each rank can run on the processors beside its GPU. torch calls numactl for it, and ends the run where it
# cannot: where this job may use only some processors. It takes node 0 for each GPU whose node is not known.
can_bind() {
  local sys=${SYSFS:-/sys} vendor # a test has a machine of its own
  [[ $gpus -gt 1 && $processes -gt 1 && -d $sys/devices/system/node/node1 ]] || return 1
  command -v numactl >/dev/null || return 1
  grep -q "^Cpus_allowed_list:[[:space:]]*$(<"$sys/devices/system/cpu/online")$" /proc/self/status || return 1
  for vendor in "$sys"/bus/pci/devices/*/vendor; do
    [[ -f $vendor ]] || return 1 # a container that hides them
    [[ $(<"$vendor") != 0x10de || $(<"${vendor%vendor}numa_node") != -1 ]] || return 1
  done
}
numa=${NUMA_BINDING-$(! can_bind || echo node)}
command=(
  "$python" "$root/launch/agent.py" "${place[@]}" "--nproc-per-node=$processes"
  "--max-restarts=${MAX_RESTARTS:-0}" "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
  ${numa:+"--numa-binding=$numa"} ${options[@]+"${options[@]}"} "$recipe/train.py" "$@"
)
if [[ -n ${ACCELERATE_CONFIG-} ]]; then
  [[ -f $ACCELERATE_CONFIG || $ACCELERATE_CONFIG == /* ]] || ACCELERATE_CONFIG=$recipe/$ACCELERATE_CONFIG
  command=("$python" "$root/launch/strategy.py" "$ACCELERATE_CONFIG" "${command[@]}")
fi
if [[ -f $recipe/around.py ]]; then # tools/doctor: looks at this machine, and then starts the command itself
  command=("$python" "$recipe/around.py" "${command[@]}")
fi
if [[ -n $dry_run ]]; then
  [[ -z ${PYTORCH_ALLOC_CONF-} ]] || printf 'PYTORCH_ALLOC_CONF=%q ' "$PYTORCH_ALLOC_CONF"
  printf 'OMP_NUM_THREADS=%s PYTHONPATH=%q' "$OMP_NUM_THREADS" "$PYTHONPATH"
  printf ' %q' ${memory[@]+"${memory[@]}"} "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
