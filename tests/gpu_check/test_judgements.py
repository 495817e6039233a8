"""What each check makes of its figures: planted faults are found."""

import pytest

from scripts.gpu_check import failures, optimizers, overlap, runs, step_time, suite, update_rate
from scripts.gpu_check.outcome import FailedError, Machine, SkippedError

CPU = Machine("cpu")


def test_pytest_summaries() -> None:
    assert suite.summary_of("== 2 failed, 81 passed in 12.31s (0:00:12) ==") == "2 failed, 81 passed"
    assert suite.summary_of("..\n3 passed, 1 skipped in 0.12s\n") == "3 passed, 1 skipped"
    assert suite.summary_of("killed") == ""


def test_a_poor_quickstart_fails() -> None:
    good, poor = ({"last": {"validation": {"accuracy": value}}} for value in (98.6, 12.0))
    assert suite.judge({"allreduce": good}) == "allreduce 98.6 %"
    for summaries in ({"allreduce": good, "aer": poor}, {}):
        with pytest.raises(FailedError, match="expected at least 90 %"):
            suite.judge(summaries)


def test_too_many_compilations_fail() -> None:
    optimizers.check_compilations(12, 6, 2)
    with pytest.raises(FailedError, match="13 graphs compiled"):
        optimizers.check_compilations(13, 6, 2)


ROWS = [{"step": 5, "split": "train", "loss": 2.0}, {"step": 5, "split": "validation", "loss": 1.9, "accuracy": 30.0}]


def test_metrics_are_compared() -> None:
    assert runs.compare(ROWS, ROWS, 0.0, "a run") == 0
    near = [ROWS[0] | {"loss": 2.002}, ROWS[1]]
    assert runs.compare(near, ROWS, 0.01, "a run") == pytest.approx(0.001)
    for got in (near, ROWS[:1], [ROWS[0] | {"loss": float("nan")}, ROWS[1]], [ROWS[0] | {"step": 6}, ROWS[1]]):
        with pytest.raises(FailedError, match="a run: "):
            runs.compare(got, ROWS, 0.0, "a run")


def test_wrong_step_times_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "measure", lambda _: ([10.0, 10.0, 10.4], [10.0, 10.2, 10.2]))
    assert step_time.compare_step_times(CPU) == "time_step_ms 1.000 of 10.2 ms measured"
    monkeypatch.setattr(step_time, "measure", lambda _: ([2.0, 10.0, 2.0], [10.0, 10.0, 10.0]))
    with pytest.raises(FailedError, match=r"0\.200 times the measured"):
        step_time.compare_step_times(CPU)


def test_slow_updates_fail() -> None:
    rates = {"copy": 3000.0, "AdamW": 2700.0, "AccumAdamW": 2600.0}
    assert update_rate.judge(rates, 0.5) == "copy 3000 GB/s, AdamW 2700 GB/s, AccumAdamW 2600 GB/s"
    with pytest.raises(FailedError, match=r"AccumAdamW has 0\.33 of the copy's rate"):
        update_rate.judge(rates | {"AccumAdamW": 1000.0}, 0.5)


def kernel(name: str, begin: float, end: float) -> dict:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_overlap_is_the_share_of_the_messages_time() -> None:
    others = [kernel("gemm", 0, 4), kernel("gemm", 3, 6), kernel("gelu", 8, 10), {"cat": "cpu_op", "name": "x"}]
    messages = [kernel("ncclDevKernel_SendRecv", 5, 9), kernel("ncclDevKernel_SendRecv", 5, 7)]
    assert overlap.overlap_of(others + messages) == pytest.approx(2 / 4)
    assert overlap.overlap_of([*others, kernel("ncclKernel_AllReduce", 6, 8)]) == 0
    with pytest.raises(FailedError, match="no kernel of NCCL"):
        overlap.overlap_of(others)
    assert overlap.judge({"aer": 0.9}) == "messages overlap computing by aer 0.90 of their time"
    with pytest.raises(FailedError, match="expected at least"):
        overlap.judge({"aer": 0.9, "one_peer_exponential": 0.1})


NAMING = "rank 0: gossip step 24 failed exchanging with rank(s) [1], bucket 1 of 2"


def test_jobs_must_end_badly_in_time_and_name_the_rank() -> None:
    failures.judge("stop", 1, 25.0, NAMING)
    failures.judge("kill", 1, 3.0, "error: worker process 1 died: signal 9")
    for how, code, seconds, output in (
        ("stop", 0, 25.0, NAMING),
        ("stop", 1, 300.0, NAMING),
        ("stop", 1, 25.0, NAMING.replace("[1]", "[3]")),
        ("kill", 1, 200.0, NAMING),
        ("raise", 1, 3.0, "rank 0 failed:\nRuntimeError: connection closed"),
    ):
        with pytest.raises(FailedError, match=how):
            failures.judge(how, code, seconds, output)


def test_checks_of_several_gpus_are_skipped_with_fewer() -> None:
    Machine("cuda", gpus=2).require_gpus(2)
    CPU.require_gpus(2)
    with pytest.raises(SkippedError, match="needs 2 GPUs, found 1"):
        Machine("cuda", gpus=1).require_gpus(2)
