"""Check 6: reported times are true, and updates and steps are about as fast as the GPU and a plain loop allow."""

from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.step_time import compare_step_times
from scripts.gpu_check.token_rate import compare_token_rates
from scripts.gpu_check.update_rate import compare_update_rates

PARTS = (compare_step_times, compare_update_rates, compare_token_rates)


def check(machine: Machine) -> str:
    """Measure all three; one that fails does not hide the others' figures."""
    said, failed = [], False
    for part in PARTS:
        try:
            said.append(part(machine))
        except FailedError as failure:
            said.append(f"FAILED {failure}")
            failed = True
    if failed:
        raise FailedError("; ".join(said))
    return "; ".join(said)
