"""Runs a benchmark under torchrun on all nodes of a job.

python -m slurm.benchmark MODULE [key=value ...]         slurm/table1.sbatch and slurm/figure6.sbatch start this
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from slurm.allocation import Allocation
from slurm.exits import JobError


def main(argv: Sequence[str]) -> int:
    """Run the module on every rank; return srun's exit code, 2 if the nodes do not fit."""
    module, *arguments = argv
    try:
        allocation = Allocation.read(os.environ)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    command = allocation.torchrun(module, arguments)
    print(shlex.join(command), flush=True)
    return subprocess.run(command, env=allocation.environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
