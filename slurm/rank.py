"""One rank of a job: python -m MODULE, but a run that was saved and stopped ends with exit code 0.

    torchrun ... -m slurm.rank MODULE [arguments ...]        MODULE: cnn.train, scripts.benchmarks.hosts, ...

In a run that goes on when workers die, it is a node's agent, which starts the workers.

torchrun and srun treat any other code as a failure: they would kill the ranks that are still writing, and fill the log
with tracebacks.
"""

import os
import signal
import sys
from runpy import run_module

import torch

from common.record import BAD_CONFIGURATION, INTERRUPTED


def main() -> None:
    """Run the module; end the process with the module's exit code, or 0 if it was interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # slurm/node.sh makes torchrun ignore it, which is inherited
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus and not torch.cuda.is_available() and "training.device=cpu" not in sys.argv:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            node, version = os.environ["SLURMD_NODENAME"], torch.__version__
            print(
                f"error: {node} has {gpus} GPUs for this job, but PyTorch {version} finds none; "
                "training.device=cpu trains without, sbatch --gpus-per-node=0 asks for none",
                file=sys.stderr,
            )
        sys.exit(BAD_CONFIGURATION)
    try:
        run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise


if __name__ == "__main__":
    main()
