"""Check 4: nobody reads a message before it has arrived, or writes parameters that are still being sent.

Messages are late copies on their own stream, see `delayed.py`. As all workers are equal there, training with messages
must give what training without them gives. On a GPU torch's sanitizer also watches every access of an operation to a
tensor; it sees no compiled kernels, so these run operation by operation.
"""

import itertools
from collections.abc import Sequence

import torch

from scripts.gpu_check.delayed import delayed_group
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.small_training import SmallTraining

STEPS, WORKERS, TOLERANCE = 12, 4, 1e-4
MESSAGE = 1000  # characters of the sanitizer's
FLAT: tuple[dict[str, object], ...] = (
    {"topology": "one_peer_exponential"},
    {"topology": "ring"},
    {"topology": "static_exponential"},
    {"topology": "complete"},
    {"topology": "one_peer_exponential", "order": "atc"},
)
# Two hosts of two. On CPUs, where hosts send shards by messages, an echo's shard is another one than it should be.
BETWEEN_HOSTS: tuple[dict[str, object], ...] = (
    {"topology": "aer", "workers_per_host": 2},
    {"topology": "complete", "workers_per_host": 2},
)


def check(machine: Machine) -> str:
    """Compare trainings with and without messages; on a GPU, also run them under the sanitizer."""
    cases = list(itertools.product(FLAT + BETWEEN_HOSTS * machine.on_gpu, (False, True)))
    largest = max(compare(machine, gossip, fused) for gossip, fused in cases)
    figure = f"{len(cases)} trainings with late messages differ from those without by at most {largest:.1e}"
    if not machine.on_gpu:
        return figure
    sanitize(cases)
    return f"{figure}; the sanitizer sees no race"


def compare(machine: Machine, gossip: dict[str, object], fused: bool) -> float:
    """Return the largest difference of a parameter after STEPS steps.

    Raises FailedError if it is larger than TOLERANCE.
    """
    alone = SmallTraining(machine.device, "fp32", fused, STEPS)
    alone.run(range(STEPS))
    with delayed_group(WORKERS):
        training = SmallTraining(machine.device, "fp32", fused, STEPS, gossip)
        training.run(range(STEPS))
        difference = (training.parameters() - alone.parameters()).abs().max().nan_to_num(torch.inf).item()
        training.close()
    if difference > TOLERANCE:
        raise FailedError(
            f"{gossip}, fused={fused}: late messages change parameters by {difference:.1e}, expected at most "
            f"{TOLERANCE:g}"
        )
    return difference


def sanitize(cases: Sequence[tuple[dict[str, object], bool]]) -> None:
    """Run steps of each case under torch's sanitizer on the GPU, after making sure that it sees a race.

    Raises FailedError naming the first race.
    """
    from torch.cuda._sanitizer import CUDASanitizer, CUDASanitizerErrors

    sanitizer = CUDASanitizer()
    sanitizer.enable()
    try:
        if not _sees_a_race(CUDASanitizerErrors):
            raise FailedError("the sanitizer overlooks a write on one stream beside a write on another")
        for gossip, fused in cases:
            print(f"under the sanitizer: {gossip}, fused={fused}", flush=True)
            with torch.compiler.set_stance("force_eager"), delayed_group(WORKERS):
                training = SmallTraining("cuda", "fp32", fused, STEPS, gossip)
                training.run(range(STEPS))
                training.close()
    except CUDASanitizerErrors as errors:
        first = " ".join(str(errors.errors[0]).split())  # the two operations, then where they were called
        raise FailedError(f"{gossip}, fused={fused}: {first[:MESSAGE]}") from errors
    finally:
        sanitizer.disable()


def _sees_a_race(kind: type[Exception]) -> bool:
    tensor = torch.zeros(8, device="cuda")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.add_(1)
    except kind:
        return True
    return False
