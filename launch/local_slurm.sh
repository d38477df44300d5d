#!/usr/bin/env bash
# Run a real Slurm cluster of several nodes on this machine, to try and test launch/slurm.sh. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/local_slurm.sh up [NODES] | down

  up     start munged, slurmctld and one slurmd per node (default 2), and print the export line with which
         sbatch, squeue and other commands find them
  down   stop them and remove their folder

Needs root and, on Debian or Ubuntu, `apt install slurm-wlm munge`. All files are in LOCAL_SLURM_DIR
(default /tmp/local-slurm). Partitions: main, and urgent, whose jobs preempt those in main, which are requeued.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

dir=${LOCAL_SLURM_DIR:-/tmp/local-slurm}
daemons=(slurmctld slurmd munged)

down() {
  local file daemon pids=()
  [[ ! -e $dir || (-f $dir/slurm.conf && -f $dir/munge.key) ]] || fail "$dir is not a cluster that this script started, so nothing was removed: check LOCAL_SLURM_DIR"
  for daemon in "${daemons[@]}"; do
    for file in "$dir/$daemon"*.pid; do
      [[ -f $file ]] && pids+=("$(<"$file")")
    done
  done
  kill ${pids[@]+"${pids[@]}"} 2>/dev/null || true
  for _ in {1..50}; do # they write their state before they exit
    kill -0 ${pids[@]+"${pids[@]}"} 2>/dev/null || break
    sleep 0.1
  done
  kill -9 ${pids[@]+"${pids[@]}"} 2>/dev/null || true
  rm -rf "$dir"
}

up() {
  local nodes=$1 host cpus port i
  [[ $nodes =~ ^[1-9][0-9]?$ ]] || fail "up $nodes: the number of nodes must be between 1 and 99"
  [[ $EUID == 0 ]] || fail "Slurm's daemons need root: use sudo bash launch/local_slurm.sh up"
  for i in slurmctld slurmd munged sbatch; do
    command -v "$i" >/dev/null || PATH=$PATH:/usr/sbin command -v "$i" >/dev/null || fail "$i is missing: apt install slurm-wlm munge"
  done
  [[ ! -e $dir ]] || fail "$dir exists: run bash launch/local_slurm.sh down first, or set LOCAL_SLURM_DIR"
  export PATH=$PATH:/usr/sbin
  host=$(hostname -s)
  cpus=$(nproc)
  port=$((17000 + $$ % 100 * 100))
  mkdir -p "$dir/state"
  chmod 755 "$dir"
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
  # Every node claims all CPUs of this machine: the cluster is for tests, not for speed.
  cat >"$dir/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdLogFile=$dir/slurmd-%n.log
SlurmdSpoolDir=$dir/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
SlurmdTimeout=20
ReturnToService=2
MpiDefault=none
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$((cpus * 4)) Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
CONF
  # Two files in the place of GPUs, so that jobs can ask for them; torch sees none.
  printf "NodeName=n[1-$nodes] Name=gpu File=%s\n" /dev/null /dev/zero >"$dir/gres.conf"
  export SLURM_CONF=$dir/slurm.conf
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
  slurmctld
  for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$dir/spool-n$i"
    slurmd -N "n$i"
  done
  for _ in {1..150}; do
    [[ $(sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l) == "$nodes" ]] && echo "export SLURM_CONF=$SLURM_CONF" && return
    sleep 0.2
  done
  tail -n 5 "$dir"/*.log >&2
  fail "the nodes did not come up within 30 s; the logs are in $dir"
}

case ${1-} in
  up) up "${2:-2}" ;;
  down) down ;;
  -h | --help) usage ;;
  *) usage >&2 && fail "${1-no command}: use up or down" ;;
esac
