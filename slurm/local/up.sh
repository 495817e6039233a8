#!/usr/bin/env bash
# A real Slurm on this one machine (Debian or Ubuntu), with virtual nodes, for trying jobs without a cluster.
#
#   sudo slurm/local/up.sh                        # node1 ... node4; ends by saying what to export
#   NODES=2 CPUS=128 GPUS=8 STATE=/tmp/slurm slurm/local/up.sh
#
# NODES   virtual nodes (4)
# CPUS    that each node claims to have (4); may exceed the machine's
# GPUS    that each node claims to have (0): for trying options; jobs do not see any
# STATE   the folder for all of it: configuration, keys, logs, spool (/run/slurm-local); new, empty, or made by up.sh
#
# Debian's packages munge, slurmctld, slurmd and slurm-client are installed if they are missing. Nothing else outside
# STATE is touched; where a Slurm runs or is configured already, nothing is done. slurm/local/down.sh ends it.
set -euo pipefail
NODES=${NODES:-4} CPUS=${CPUS:-4} GPUS=${GPUS:-0} STATE=${STATE:-/run/slurm-local}
refuse() { echo "up.sh: $1" >&2; exit 1; }

[ "$(id -u)" = 0 ] || refuse "needs root (sudo slurm/local/up.sh)"
case $NODES$CPUS$GPUS in *[!0-9]*) refuse "NODES=$NODES CPUS=$CPUS GPUS=$GPUS: expected numbers" ;; esac
if [ -e "$STATE" ] && [ ! -e "$STATE/made-by-up.sh" ]; then # down.sh removes all of it
    [ -d "$STATE" ] && [ -z "$(ls -A "$STATE")" ] || refuse "STATE=$STATE: expected a new or an empty folder"
fi
[ ! -e "$STATE/pids" ] || refuse "$STATE/pids exists: this Slurm is up already; slurm/local/down.sh ends it"
# Zombies that are never reaped, as in containers, do not count.
for daemon in slurmctld slurmd; do
    ! ps -C "$daemon" -o stat= | grep -qv '^Z' || refuse "a $daemon runs on this machine already: use that Slurm"
done
[ ! -e /etc/slurm/slurm.conf ] || refuse "/etc/slurm/slurm.conf exists: this machine belongs to a cluster already"
if command -v scontrol >/dev/null && timeout 20 scontrol ping 2>/dev/null | grep -q "is UP"; then
    refuse "a slurmctld answers (scontrol ping): this machine belongs to a cluster already"
fi

missing=()
for package in munge:munged slurmctld:slurmctld slurmd:slurmd slurm-client:sbatch; do
    command -v "${package#*:}" >/dev/null || missing+=("${package%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || refuse "missing: ${missing[*]}; install them (no apt-get here)"
    echo "installing ${missing[*]}"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
    # Where systemd runs, packages start their services; ours are separate.
    if [ -d /run/systemd/system ]; then systemctl stop "${missing[@]}" 2>/dev/null || true; fi
fi

munge=$STATE/munge host=$(hostname)
install -d -m 755 "$STATE" "$STATE/log" "$STATE/controller"
: >"$STATE/pids"
: >"$STATE/made-by-up.sh"

start() { # start NAME COMMAND...: a daemon in a session of its own, remembered by its process id
    local name=$1
    shift
    setsid "$@" </dev/null >>"$STATE/log/$name.out" 2>&1 &
    echo "$name $!" >>"$STATE/pids"
}

# munge has its own key and socket. It insists on owning its folders.
install -d -o munge -g munge -m 755 "$munge"
install -d -o munge -g munge -m 700 "$munge/private"
if [ ! -s "$munge/private/key" ]; then
    head -c 1024 /dev/urandom | install -o munge -g munge -m 400 /dev/stdin "$munge/private/key"
fi
start munged setpriv --reuid=munge --regid=munge --clear-groups munged --foreground \
    --key-file="$munge/private/key" --socket="$munge/socket" --pid-file="$munge/pid" \
    --log-file="$munge/private/log" --seed-file="$munge/private/seed"

export STATE SLURM_CONF=$STATE/slurm.conf
{
    # cred_expire is also how long a requeued job waits: 120 s by default.
    cat <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$STATE/controller
SlurmdSpoolDir=$STATE/spool-%n
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd-%n.pid
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdLogFile=$STATE/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=30
MinJobAge=86400
SlurmctldTimeout=30
SlurmdTimeout=15
MailProg=/bin/true
GresTypes=gpu
CONF
    for number in $(seq "$NODES"); do
        echo "NodeName=node$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000 + number))" \
            "CPUs=$CPUS RealMemory=1000000 Gres=gpu:$GPUS State=UNKNOWN"
    done
    # Jobs in `spot` give way to those in `main`: they are requeued.
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10"
    echo "PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"
} >"$SLURM_CONF"
for number in $(seq "$GPUS"); do
    : >"$STATE/gpu$number" # a GPU is a file
    echo "Name=gpu File=$STATE/gpu$number"
done >"$STATE/gres.conf"

for _ in $(seq 100); do [ -S "$munge/socket" ] && break; sleep 0.1; done
start slurmctld slurmctld -D -f "$SLURM_CONF"
for number in $(seq "$NODES"); do
    start "slurmd-node$number" slurmd -D -f "$SLURM_CONF" -N "node$number"
done
for _ in $(seq 150); do
    idle=$(timeout 5 sinfo -h -p main -t idle -o %D 2>/dev/null | awk '{s += $1} END {print s + 0}') || true
    if [ "${idle:-0}" = "$NODES" ]; then
        echo "$NODES nodes are idle. In every shell that uses them:"
        echo "export SLURM_CONF=$SLURM_CONF"
        exit 0
    fi
    sleep 0.3
done
tail -n 5 "$STATE"/log/*.out >&2 || true
"$(dirname "$0")/down.sh" >&2
refuse "only ${idle:-0} of $NODES nodes became idle; the ends of their logs are above"
