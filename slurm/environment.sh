# Every job sources this, in the repository's root. What your cluster needs goes to slurm/site.sh, which git ignores:
# `module load`, network interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME),
# SRUN_OPTIONS (for instance of a container), VENV (another virtual environment; empty: none is activated).
if [ -e slurm/site.sh ]; then . slurm/site.sh; fi
VENV=${VENV-.venv}
if [ -n "$VENV" ]; then . "$VENV/bin/activate"; fi
