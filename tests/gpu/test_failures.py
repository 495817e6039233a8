"""A rank that dies, raises or stands still ends the job in time, the rank is named, and the run continues."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.device import CUDA, Device, program
from tests.training.faulty.task import MARK

CHECK = 10, "failures end the job"
TIMEOUT_S = 20.0  # parallel.timeout_s
# Seconds from the fault to the end of the job; elastic waits 30 s for a stopped process before it kills it.
END_WITHIN_S = {"kill": 20.0, "raise": 20.0, "stop": TIMEOUT_S + 60.0}
BESIDE_OTHER_TESTS_S = 150.0
NAMED = {
    "kill": r"worker process 1 died|rank\(s\) \[[^\]]*\b1\b",
    "raise": r"rank 1 failed:[\s\S]*ValueError: this rank is broken",
    "stop": r"rank\(s\) \[[^\]]*\b1\b",
}
RUN = ["cnn.train", "task=tests.training.faulty", "workers.count=2", "topology=one_peer_exponential", "model.width=8"]
RUN += ["training.steps=40", "training.checkpoint_every=10", "evaluation.every=40", "schedule.warmup=3"]
RUN += ["logging.progress=false", "resume=true"]


def judge(how: str, code: int, seconds: float, output: str, limit_s: float) -> None:
    assert code == 1, f"{how}: the job ended with {code}"
    assert seconds <= limit_s, f"{how}: the job ended after {seconds:.0f} s"
    assert re.search(NAMED[how], output), f"{how}: nobody names rank 1: {output[-2000:]}"


@pytest.mark.parametrize(
    ("device", "how"),
    [
        pytest.param("cpu", "kill", marks=pytest.mark.slow),
        *(pytest.param(*CUDA.values, how, marks=CUDA.marks) for how in END_WITHIN_S),
    ],
    indirect=["device"],
)
def test_a_rank_that_fails_ends_the_job(
    device: Device, how: str, figure: Callable[[str], None], tmp_path: Path
) -> None:
    device.require_gpus(2)
    timeout_s = TIMEOUT_S if device.on_gpu else 6
    arguments = [*RUN, f"parallel.timeout_s={timeout_s:g}", f"training.device={device.name}", f"run_dir={tmp_path}/run"]
    limit_s = 240 if device.on_gpu else 900
    code, output = program(*arguments, f"name={how}", limit_s=limit_s)
    ended, mark = time.time(), tmp_path / "run" / MARK
    assert mark.exists(), f"the run ended before rank 1 failed: {output[-2000:]}"
    seconds = ended - float(mark.read_text())
    judge(how, code, seconds, output, END_WITHIN_S[how] if device.on_gpu else BESIDE_OTHER_TESTS_S)
    figure(f"from the fault to the end of the job: {how} {seconds:.0f} s")
    code, output = program(*arguments, limit_s=limit_s)
    assert code == 0, output[-2000:]
    assert "resumed at step" in output


NAMING = "rank 0: gossip step 24 failed exchanging with rank(s) [1], bucket 1 of 2"


def test_jobs_must_end_badly_in_time_and_name_the_rank() -> None:
    judge("stop", 1, 25.0, NAMING, 80)
    judge("kill", 1, 3.0, "error: worker process 1 died: signal 9", 20)
    for how, code, seconds, output in (
        ("stop", 0, 25.0, NAMING),
        ("stop", 1, 300.0, NAMING),
        ("stop", 1, 25.0, NAMING.replace("[1]", "[3]")),
        ("raise", 1, 3.0, "rank 0 failed:\nRuntimeError: connection closed"),
    ):
        with pytest.raises(AssertionError, match=how):
            judge(how, code, seconds, output, END_WITHIN_S[how])
