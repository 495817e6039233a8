#!/usr/bin/env bash
# srun starts one of these on each node: it starts torchrun there, and passes warnings on to the workers themselves.
# torchrun itself ignores both signals (SIGTERM since PyTorch 2.9): it would die of SIGUSR1 and of a second SIGTERM, and
# kill workers that need more than 30 s to save after the first.
set -uo pipefail

address_of() { # the address by which Slurm knows a node
    scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
}

interface_to() { # the network interface that holds this address, or that leads to it
    local ip
    ip=$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')
    [ -n "$ip" ] || return
    ip -o -4 addr show to "$ip" | awk '{print $2}' | grep . || ip -o route get "$ip" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}

here=$(address_of "$SLURMD_NODENAME") first=$(address_of "$FIRST_NODE")
if [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
    interface=$(interface_to "$first" 2>/dev/null) && [ -n "$interface" ] && export GLOO_SOCKET_IFNAME=$interface
fi

(
    trap '' USR1 TERM # inherited: workers that are still starting ignore USR1 too, and are told again
    export PET_SIGNALS_TO_HANDLE=SIGINT
    exec python -m torch.distributed.run --rdzv-endpoint="$first:$RENDEZVOUS_PORT" --local-addr="$here" "$@"
) &
launcher=$!
trap '(trap "" USR1 TERM && pkill -USR1 -P "$launcher")' USR1 TERM
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2>/dev/null || exit "$code" # else a signal ended the wait
done
