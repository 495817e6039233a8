#!/usr/bin/env bash
# srun starts one of these on each node: it starts torchrun there, and passes warnings on to the workers themselves.
# With --elastic it instead starts the node's agent of an elastic run (elastic=true), and passes warnings on to that.
# torchrun itself ignores both signals (SIGTERM since PyTorch 2.9): it would die of USR1 and of a second SIGTERM, and
# kill workers that need more than 30 s to save after the first. It may run in a container: it needs none of
# Slurm's own programs, and without `ip` the libraries choose the network interface.
set -uo pipefail

address_of() { # of a node, as slurm/job.py found it; its name where Slurm did not say
    local pair
    for pair in $NODE_ADDRESSES; do [ "${pair%%=*}" != "$1" ] || { echo "${pair#*=}" && return; }; done
    echo "$1"
}

interface_to() { # the network interface that leads to this address
    local ip
    ip=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')
    [ -z "$ip" ] || ip -o route get "$ip" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}

first=$(address_of "$FIRST_NODE") hosts=0 peer=$FIRST_NODE
if [ "$SLURMD_NODENAME" = "$FIRST_NODE" ]; then # its own name may resolve to the loopback
    hosts=1
    for pair in $NODE_ADDRESSES; do [ "${pair%%=*}" = "$FIRST_NODE" ] || peer=${pair%%=*}; done
fi
interface=$(interface_to "$(address_of "$peer")" 2>/dev/null)
if [ -n "$interface" ] && [ "$peer" != "$SLURMD_NODENAME" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
fi

case $first in *:*) first="[$first]" ;; esac # IPv6
mode=torchrun
if [ "$1" = --elastic ]; then mode=elastic && shift; fi
(
    trap '' USR1 TERM # inherited: workers that are still starting ignore USR1 too, and are told again
    if [ "$mode" = elastic ]; then
        export ELASTIC_AGENT="$first:$RENDEZVOUS_PORT" ELASTIC_LEADS=$hosts
        exec python -m slurm.rank "$@"
    fi
    export PET_SIGNALS_TO_HANDLE=SIGINT
    exec python -m torch.distributed.run --rdzv-endpoint="$first:$RENDEZVOUS_PORT" \
        --rdzv-conf="is_host=$hosts,read_timeout=600" --local-addr="$(address_of "$SLURMD_NODENAME")" "$@"
) &
launcher=$!
warned() { if [ "$mode" = elastic ]; then echo "$launcher"; else cat /proc/"$launcher"/task/*/children; fi; }
warn() { (trap '' USR1 TERM && kill -USR1 $(warned)) 2>/dev/null; }
trap warn USR1 TERM
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2>/dev/null || exit "$code" # else a signal ended the wait
done
