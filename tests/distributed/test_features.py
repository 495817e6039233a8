"""What an ordinary training does besides forward, backward, step: the engine still equals the simulator."""

import threading
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from common.optim import Cosine
from common.parallel import Mixing, Outer
from common.topology import Round, Topology, build
from tests.distributed import models
from tests.distributed.comparison import ATOL, RTOL, assert_equal_to_simulator, assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, real

BASE = Scenario(topology="one_peer_exponential", optimizer="momentum", steps=12)
CONV = replace(BASE, model=models.conv_bn, inputs=(3, 6, 6))
SCHEDULE = partial(LambdaLR, lr_lambda=Cosine(total_steps=12, warmup_steps=3))
FEATURES = {
    "gradient accumulation": replace(BASE, accumulate=3),
    "clipping": replace(BASE, clip=0.1),
    "tied weights": replace(BASE, model=models.Tied, optimizer="accumadamw"),
    "unused parameters": replace(BASE, model=models.Unused, optimizer="accumadam"),
    "frozen layer": replace(BASE, model=models.frozen),
    "channels_last and BatchNorm": CONV,
    "schedule": replace(BASE, schedule=SCHEDULE),
    "two optimizers": replace(BASE, optimizer="momentum+adamw"),
    "LSTM": replace(BASE, model=models.Recurrent, inputs=(4, 5), optimizer="adamw"),
    "activation checkpointing": replace(BASE, model=models.Checkpointed),
}
# Of the two, `complete` travels by all-reduce in a group and one_peer_exponential by send and receive.
ORDERS = [("one_peer_exponential", "awc"), ("one_peer_exponential", "atc"), ("complete", "awc")]


def test_every_feature() -> None:
    """Each by one transport and order, in turn."""
    orders = zip(FEATURES.values(), cycle(ORDERS), strict=False)
    assert_equal_to_simulator(3, [replace(base, topology=t, order=order) for base, (t, order) in orders])


LOCAL = {"local_steps": 3, "merge_after": 2, "outer": Outer(lr=0.4, momentum=0.9)}
LONGER = LOCAL | {"local_steps": 4}  # than AccumAdam's window of 3: with equal ones training diverges


def test_features_with_local_steps() -> None:
    """Those that touch parameters or the step."""
    scenarios = [
        replace(BASE, accumulate=3, clip=0.1, schedule=SCHEDULE, local=LOCAL),
        replace(BASE, model=models.frozen, optimizer="momentum+adamw", local=LOCAL | {"fragments": 2}),
        replace(CONV, order="atc", local={"local_steps": 3, "outer": LOCAL["outer"]}),
    ]
    assert_equal_to_simulator(3, scenarios)
    # Sums in another order may round parameters in bfloat16 the other way, which has 8 bits.
    mixed = replace(BASE, model=models.MixedDtypes, optimizer="accumadam", topology="ring")
    assert_equal_to_simulator(3, [replace(mixed, local=LONGER | {"fragments": 3})], rtol=1e-2, atol=5e-4)


@pytest.mark.slow
def test_a_fused_optimizer_with_local_steps() -> None:
    """It lays parameters out anew, and so the anchors; with weaker mixing it goes on bucket by bucket."""
    fused = replace(BASE, model=models.Unused, optimizer="fused_accumadamw")
    weaker = replace(fused, schedule=SCHEDULE, local={"mixing": Mixing(power=2, start=3)})
    topologies = ("one_peer_exponential", "complete", "ring")
    assert_equal_to_simulator(
        3, [replace(fused, local=LOCAL), *(replace(weaker, topology=topology) for topology in topologies)]
    )


@pytest.mark.slow
def test_compiled_modules_train_alike_and_keep_bare_names() -> None:
    scenarios = [replace(BASE, model=m, steps=4) for m in (models.compiled, models.compiled_in_place, models.mlp)]
    for *compiled, eager in assert_equal_to_simulator(2, scenarios):
        for result in compiled:
            assert_same(result["state"], eager["state"], rtol=RTOL, atol=ATOL)


def test_dmsgd_with_features() -> None:
    base = replace(BASE, order="atc", optimizer="dmsgd")
    scenarios = [replace(base, topology="complete")]
    for name in ("dmsgd", "dmsgd_local", "qg_dmsgd"):
        unused = replace(base, model=models.Unused, optimizer=f"{name}+qg_dmsgd", schedule=SCHEDULE)
        scenarios += [unused, replace(CONV, optimizer=name, order="atc")]
    assert_equal_to_simulator(3, scenarios)


@pytest.mark.parametrize("n", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_hosts_of_two_workers(n: int) -> None:
    """Every host averages inside, shards travel between hosts: by send and receive, or by all-reduce ("complete")."""
    aer = replace(BASE, topology="aer", workers_per_host=2)
    complete = replace(BASE, topology="complete", workers_per_host=n // 4 * 2)
    tiny = replace(aer, options={"bucket_mb": 0.00006})  # 16 elements
    between = replace(BASE, topology=build("one_peer_exponential", n, 2, between_hosts=True))
    plain = replace(BASE, topology="hypercube", workers_per_host=2, phases="staggered")  # messages that take turns
    optimizer = replace(aer, optimizer="accumadamw", model=models.Tied)
    staggered = replace(aer, phases="staggered")  # odd buckets run rounds in another order; every host sends evenly
    variants = [aer, replace(staggered, order="atc"), replace(optimizer, phases="staggered"), complete, between, plain]
    assert_equal_to_simulator(n, variants if n == 8 else [*variants, staggered, replace(aer, order="atc"), tiny])


@pytest.mark.parametrize("backend", [pytest.param(None, marks=pytest.mark.slow), "cpu:gloo"])
def test_backends_that_are_not_called_gloo(backend: str | None) -> None:
    """What lies on the CPU overlaps all the same: its stages run in threads, not within the launch."""
    aer = replace(BASE, topology="aer", workers_per_host=2)
    assert_equal_to_simulator(4, [aer], backend=backend)
    assert all(run_processes(stage_threads, 4, aer, backend=backend))


def stage_threads(rank: int, n: int, scenario: Scenario) -> list[str]:
    real(rank, scenario).run(range(3))
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gossip-stage")]


@pytest.mark.slow
def test_hosts_of_three_workers() -> None:
    """Pieces of a bucket are of different sizes, the last may be empty."""
    aer = replace(BASE, topology="aer", workers_per_host=3)
    assert_equal_to_simulator(
        6, [aer, replace(aer, topology=build("ring", 6, 3, between_hosts=True), options={"bucket_mb": 0.02})]
    )


def test_steps_bucket_by_bucket() -> None:
    """Fused AccumAdam merges, updates and launches each bucket by itself: with every transport, parameters that get
    no gradient, mixed layouts, and beside a second optimizer (where it steps as others do)."""
    base = replace(BASE, optimizer="fused_accumadamw")
    variants = [
        replace(base, model=models.Tied),
        replace(base, topology="ring", workers_per_host=2, model=models.Tied),  # two peers: merged before the update
        replace(base, topology="complete"),
        replace(base, topology="aer", workers_per_host=2, phases="staggered"),
        replace(base, topology="aer"),  # idle rounds
        replace(base, model=models.Unused),
        replace(base, model=models.conv_bn, inputs=(3, 6, 6), accumulate=2, clip=0.1),
        replace(base, options={"message_dtype": torch.float32}),
        replace(base, optimizer="fused_accumadamw+momentum"),
        replace(base, order="atc"),
    ]
    assert_equal_to_simulator(4, variants)


@pytest.mark.slow
def test_compiled_steps_bucket_by_bucket() -> None:
    base = replace(BASE, optimizer="fused_accumadamw", compiled=True)
    assert_equal_to_simulator(2, [replace(base, model=models.Tied), replace(base, topology="ring")])


def test_push_sum_on_a_directed_graph() -> None:
    """Rank 0 takes from two, rank 1 from one: weights differ, and with them what an update does."""
    graph = Round(({0: 0.5, 1: 0.25, 2: 0.5}, {0: 0.5, 1: 0.5}, {1: 0.25, 2: 0.5}))
    topology = Topology("directed", 3, schedule=(graph,))
    base = replace(BASE, topology=topology, push_sum=True)
    adam = replace(base, optimizer="fused_accumadamw", model=models.Tied)
    assert_equal_to_simulator(
        3, [base, replace(base, order="atc"), adam, replace(CONV, topology=topology, push_sum=True)]
    )


def test_parameters_in_bfloat16_and_float32() -> None:
    # bfloat16 has 8 bits: engine and simulator round W x differently in the last one (2^-8 of a value), in every
    # step, and training carries that into the float32 layers.
    mixed = replace(BASE, model=models.MixedDtypes, steps=5)
    variants = [replace(mixed, topology=topology, order=order) for topology, order in ORDERS]
    assert_equal_to_simulator(3, variants, rtol=2**-6, atol=2**-8)


def test_forced_transports() -> None:
    forced = [{"transport": transport} for transport in ("send_recv", "subgroup")]
    topologies = ("one_peer_ring", "complete")
    assert_equal_to_simulator(4, [replace(BASE, topology=t, options=options) for t in topologies for options in forced])


def test_bucket_size_changes_no_bit() -> None:
    sizes = [{"bucket_mb": size} for size in (0.0001, 0.0007, 2.0)]
    for small, medium, large in assert_equal_to_simulator(4, [replace(BASE, options=size) for size in sizes]):
        assert_same(small["state"], large["state"])
        assert_same(medium["state"], large["state"])


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_allreduce(n: int) -> None:
    base = replace(BASE, method="allreduce")
    features = [
        base,
        replace(base, optimizer="accumadamw", accumulate=2, clip=0.1),
        replace(base, model=models.conv_bn, inputs=(3, 6, 6)),
        replace(base, model=models.frozen),
        replace(base, model=models.Unused, options={"find_unused_parameters": True}),
        replace(base, optimizer="momentum+adamw"),
    ]
    results = assert_equal_to_simulator(n, features)
    assert all(result["distance"] == 0 for rank in results for result in rank)
