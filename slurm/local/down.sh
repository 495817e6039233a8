#!/usr/bin/env bash
# Ends the Slurm that slurm/local/up.sh started: cancels its jobs, stops its daemons, removes STATE.
#   sudo slurm/local/down.sh          STATE as for up.sh
set -uo pipefail
STATE=${STATE:-/run/slurm-local}
[ -e "$STATE/pids" ] && [ -e "$STATE/made-by-up.sh" ] || { echo "nothing runs at $STATE"; exit 0; }
[ "$(id -u)" = 0 ] || { echo "down.sh: needs root" >&2; exit 1; }
export SLURM_CONF=$STATE/slurm.conf
timeout 10 squeue -h -o %A 2>/dev/null | xargs -r timeout 10 scancel --full --signal=KILL 2>/dev/null
timeout 10 squeue -h -o %A 2>/dev/null | xargs -r timeout 10 scancel 2>/dev/null
for _ in $(seq 50); do
    [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
    sleep 0.2
done
# Whether a daemon (such as slurmd-node1 PID) still runs; once it has ended, another process may have its PID.
runs() { [[ $(tr '\0' ' ' 2>/dev/null <"/proc/$2/cmdline") == "${1%%-*} "* ]]; } 2>/dev/null
for name in slurmd slurmctld munged; do
    while read -r daemon pid; do runs "$daemon" "$pid" && kill "$pid"; done < <(grep "^$name" "$STATE/pids")
    while read -r daemon pid; do
        for _ in $(seq 50); do runs "$daemon" "$pid" || continue 2; sleep 0.1; done
        echo "$daemon did not stop; killed"
        kill -9 "$pid" 2>/dev/null
    done < <(grep "^$name" "$STATE/pids")
done
rm -rf "$STATE"
echo "removed $STATE"
