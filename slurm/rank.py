"""One rank of a job: python -m TASK.train, but a run that was saved and stopped ends with exit code 0.

    torchrun ... -m slurm.rank TASK [overrides ...]

torchrun and srun take any other code for a failure: they would kill the ranks that are still writing, and fill the log
with tracebacks of it.
"""

import signal
import sys

from common.training.cli import main as train
from slurm.job import INTERRUPTED


def main() -> None:
    """Trains; ends the process with the run's exit code, or 0 if it was interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # slurm/node.sh lets torchrun ignore it, which is inherited
    task = sys.argv.pop(1)
    try:
        train(task)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise


if __name__ == "__main__":
    main()
