"""Faults planted into the engine, the optimizers and the training loop are found; without them the checks pass."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.optim import AccumAdam, AccumAdamW, accum_adam, compiled, flat_state
from common.parallel.gossip.exchange import ReceiveBuffers
from common.parallel.gossip.mixer import Mixer
from common.parallel.gossip.point_to_point import SendRecv
from common.training import gradients
from common.training.launch import launch
from common.training.run_folder import RunFolder
from scripts.gpu_check import (
    gossip,
    host_syncs,
    memory,
    optimizers,
    races,
    runs,
    small_training,
    step_time,
    token_rate,
    update_rate,
)
from scripts.gpu_check.optimizers import Update
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.processes import run_ranks

CPU = Machine("cpu")


# -- 2: optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_update_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update(AccumAdamW, dtype, 3)
    optimizers.compare(CPU, update, ["plain", "foreach"])
    right = accum_adam.accum_adam_update

    def wrong(*tensors: Any, foreach: bool) -> None:
        *others, hyper = tensors
        right(*others, dataclasses.replace(hyper, lr=1.2 * hyper.lr) if foreach else hyper, foreach=foreach)

    monkeypatch.setattr(accum_adam, "accum_adam_update", wrong)
    with pytest.raises(FailedError, match=r"AccumAdamW, foreach, torch\.\w+, windows of 3: parameter"):
        optimizers.compare(CPU, update, ["plain", "foreach"])


@pytest.mark.slow
def test_a_wrong_fused_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "graphs compiled" in optimizers.check(CPU)
    right = flat_state.update_compiled

    def wrong(vectors: Any, k: int, *others: Any) -> None:
        right(vectors, k + 1, *others)  # another window's correction

    monkeypatch.setattr(flat_state, "update_compiled", wrong)
    for variant in ("fused", "fused in flat vectors"):
        with pytest.raises(FailedError, match=f"AccumAdam, {variant},"):
            optimizers.compare(CPU, Update(AccumAdam, torch.float32, 1), [variant])


# -- 3: host syncs


def reading(*arguments: Any) -> Tensor:
    norm = clip_grad_norm_(*arguments)
    norm.item()
    return norm


def test_a_host_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_syncs.watch_steps(CPU, "fp32", fused=False) == []
    monkeypatch.setattr(small_training, "clip_grad_norm_", reading)
    (complaint,) = host_syncs.watch_steps(CPU, "fp32", fused=False)
    assert complaint.startswith("fp32, fused=False: aten._local_scalar_dense.default reads a tensor")


@pytest.mark.slow
def test_a_host_sync_of_the_training_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("gpt2", "cnn"):
        assert host_syncs.watch_run(CPU, task) == []
    monkeypatch.setattr(gradients, "clip_grad_norm_", reading)
    (complaint,) = host_syncs.watch_run(CPU, "gpt2")
    assert complaint.startswith("gpt2.train: aten._local_scalar_dense.default reads a tensor")


# -- 4: races


ONE_PEER = {"topology": "one_peer_exponential"}


def test_a_message_read_before_it_arrives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixer, "_wait", lambda *_: None)
    with pytest.raises(FailedError, match="late messages change parameters"):
        races.compare(CPU, ONE_PEER, fused=False)


@pytest.mark.slow
def test_parameters_written_while_they_are_sent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Mixer.launch

    def early(mixer: Mixer, fragment: int = 0, *, writable: bool = False) -> None:
        launch(mixer, fragment, writable=writable)
        for vector in mixer.vectors:
            vector.data.mul_(0.999)

    monkeypatch.setattr(Mixer, "launch", early)
    with pytest.raises(FailedError, match="late messages change parameters"):
        races.compare(CPU, ONE_PEER, fused=False)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_kernel")
def test_late_messages_change_nothing() -> None:
    assert "10 trainings with late messages" in races.check(CPU)


# -- 5: runs


@pytest.mark.slow
def test_resumed_runs_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not killed run in this process, which has imported what they need."""
    monkeypatch.setattr(runs, "COMPARED_STEPS", 5)
    monkeypatch.setattr(runs, "RESUMED_STEPS", 40)
    monkeypatch.setattr(runs, "run_program", lambda command, _: (launch("cnn", command[3:]), ""))
    assert "resumed by 0.0e+00" in runs.check(CPU)
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_a_run_that_cannot_be_killed_is_no_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "RUN", [*runs.RUN, "optimizer.lr=fast"])
    with pytest.raises(FailedError, match=r"no checkpoint to resume from: error: optimizer\.lr"):
        runs.kill(tmp_path, "cpu", 20)


# -- 6: speed


@pytest.mark.slow
def test_wrong_step_times_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "time_step_ms" in step_time.compare_step_times(CPU, tolerance=0.2)
    append = RunFolder.append

    def halved(folder: RunFolder, row: dict) -> None:
        append(folder, row | ({"time_step_ms": row["time_step_ms"] / 2} if row["split"] == "train" else {}))

    monkeypatch.setattr(RunFolder, "append", halved)
    with pytest.raises(FailedError, match="times the measured"):
        step_time.compare_step_times(CPU, tolerance=0.2)


@pytest.mark.slow
def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GB/s" in update_rate.compare_update_rates(CPU)
    monkeypatch.setattr(token_rate, "TURNS", 3)
    assert "tokens/s" in token_rate.compare_token_rates(CPU, least_share=0.02)
    with pytest.raises(FailedError, match="expected at least 50"):
        token_rate.compare_token_rates(CPU, least_share=50)


# -- 7: gossip


def uncompiled(*arguments: Any) -> tuple:
    compiled.fused_kernel = compiled.written_kernel
    return gossip.train_in_rank(*arguments)


def wrong_mixing(rank: int, n: int, machine: Machine, cases: Sequence[gossip.Case]) -> tuple:
    """Rank 1's weights sum to more than 1."""
    if rank == 1:
        right = SendRecv.merge

        def wrong(exchange: SendRecv) -> None:
            right(exchange)
            exchange.chunk.mul_(1.05)

        SendRecv.merge = wrong
    return gossip.train_in_rank(rank, n, machine, cases)


@pytest.mark.slow
def test_ranks_train_as_simulated_workers_do() -> None:
    cases = gossip.possible(gossip.some_cases(4), 4)
    assert {case.topology for case in cases} == set(gossip.NAMES) - {"file"}
    assert len(gossip.compare(CPU, 4, cases, in_rank=uncompiled)) == len(cases)


@pytest.mark.slow
def test_wrong_mixing_is_found_whatever_the_dtype() -> None:
    for dtype, message_dtype in gossip.TOLERANCES:
        case = gossip.Case("one_peer_exponential", dtype=dtype, message_dtype=message_dtype)
        with pytest.raises(FailedError, match="1 of 1 cases on 2 ranks"):
            gossip.compare(CPU, 2, [case], in_rank=wrong_mixing)
    with pytest.raises(FailedError, match="1 of 1 cases on 4 ranks"):
        gossip.compare(CPU, 4, [gossip.Case("one_peer_exponential", shards=2)], in_rank=wrong_mixing)


@pytest.mark.slow
def test_every_case_has_every_choice() -> None:
    cases = gossip.possible(gossip.every_case(2), 2)
    for field in ("topology", "transport", "dtype", "message_dtype", "order", "phases", "optimizer"):
        assert len({getattr(case, field) for case in cases}) > 1
    assert len(cases) > 300


# -- 8: memory


def test_growing_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory.SIZES, "cpu", memory.Size(steps=30, warmup=6, every=8, width=32, layers=3))
    kept: list[Tensor] = []
    step = memory.alone(CPU)

    def leaking() -> None:
        step()
        kept.append(torch.zeros(2000))

    with pytest.raises(FailedError, match="memory grew by"):
        memory.grow(CPU, leaking)


def leaking_buffers(rank: int, n: int, machine: Machine) -> float:
    kept = []
    ReceiveBuffers.give_back = lambda _, vector: kept.append(vector)
    return memory.grow_in_rank(rank, n, machine, False)


@pytest.mark.slow
def test_memory_of_messages_that_stays_is_found() -> None:
    assert memory.grow(CPU, memory.alone(CPU)) < 0.1
    assert max(run_ranks(memory.grow_in_rank, 4, CPU, False)) < 0.5
    with pytest.raises(FailedError, match="memory grew by"):
        run_ranks(leaking_buffers, 4, CPU)
