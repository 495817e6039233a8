# Every job sources this, in the repository's root. What your cluster needs goes into slurm/site.sh, which git ignores:
# `module load`, network interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME),
# SRUN_OPTIONS (for instance of a container), VENV (another virtual environment; empty: none is activated).
set +eu # the hooks of conda and modules use variables that are not set
if [ -e slurm/site.sh ]; then . slurm/site.sh; fi
VENV=${VENV-.venv}
if [ -n "$VENV" ]; then
    if [ ! -e "$VENV/bin/activate" ]; then
        echo "error: VENV=$VENV: no environment there; run \`make env\`, or see slurm/README.md" >&2
        exit 2
    fi
    . "$VENV/bin/activate"
fi
set -eu
