"""Predicted bytes of a rank against the tensors that the engine really holds, and by hand."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from common.dtensors import local
from common.optim import AccumAdamW
from common.options import LocalSteps, Outer
from common.parallel import DecentralizedDataParallel
from common.planner import Cluster
from common.planner.memory import rank_memory, sent_mb
from common.planner.plan import plan
from common.topology import build
from tests.distributed.processes import run_processes
from tests.naming import case
from tests.planner.clusters import cluster

WIDTH, STEPS = 128, 8
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "accumadamw": lambda p: AccumAdamW(p, 0.01, accumulation_steps=4, fused=True),
}
ROUNDS = LocalSteps(4, 2, Outer(0.5, 0.9))
# topology, workers_per_host, shards, optimizer, local steps
CASES = [
    ("one_peer_exponential", 1, 2, "adamw", None),
    ("one_peer_exponential", 1, 2, "accumadamw", None),
    ("one_peer_exponential", 1, 2, "sgd", ROUNDS),
    ("one_peer_exponential", 1, 1, "accumadamw", None),
    ("complete", 1, 1, "adamw", None),
    ("ring", 1, 1, "sgd", None),
    ("aer", 2, 1, "adamw", None),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def held(tensors: Iterator[Tensor]) -> float:
    """Return the MB of memory behind these tensors, each once; counts of steps do not matter."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > 1}
    return sum(storages.values()) / 1e6


def measured(rank: int, n: int) -> list[dict[str, float]]:
    """Return what each case holds and sends in a round, on this rank."""
    found = []
    for topology, per_host, shards, optimizer_name, rounds in CASES:
        module = model()
        if shards > 1:
            mesh = init_device_mesh("cpu", (n // shards, shards), mesh_dim_names=("replicate", "shard"))
            for layer in module:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh["shard"])
            fully_shard(module, mesh=mesh["shard"])
        options = {} if rounds is None else {"local_steps": 4, "merge_after": 2, "outer": rounds.outer}
        if per_host > 1:
            options["workers_per_host"] = per_host
        wrapped = DecentralizedDataParallel(module, topology, ranks_per_worker=shards, bucket_mb=0.05, **options)
        optimizer = wrapped.attach(OPTIMIZERS[optimizer_name](wrapped.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            wrapped(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
        buffers = wrapped.mixer._buffers
        flying = [e for exchanges in wrapped.mixer._in_flight.values() for e in exchanges if e is not None]
        taken = [vector for exchange in flying for vector in exchange._taken]
        state = [local(leaf) for leaf in tree_leaves(optimizer.state_dict()["state"]) if isinstance(leaf, Tensor)]
        found.append(
            {
                "parameters": held(local(p) for p in module.parameters()),
                "gradients": held(local(p.grad) for p in module.parameters()),
                "optimizer": held(iter(state)),
                "outer": held(t for k, t in wrapped.communication_state().items() if not k.startswith("layout")),
                "messages": held(iter(taken + [v for free in buffers._free.values() for v in free])),
                "sent": wrapped.counters.bytes_sent / wrapped.counters.rounds / 1e6,
            }
        )
        wrapped.close()
    return found


@pytest.mark.slow
def test_ranks_hold_and_send_what_is_predicted() -> None:
    n, payload_mb = 4, 6 * WIDTH**2 * 4 / 1e6
    results = run_processes(measured, n)
    for index, (topology, per_host, shards, optimizer, rounds) in enumerate(CASES):
        hosts = n // shards // per_host
        there = Cluster(hosts=hosts, workers_per_host=per_host, shards=shards, payload_mb=payload_mb)
        built = None if topology == "complete" else build(topology, n // shards, per_host)
        expected = rank_memory(there, optimizer, built, rounds)
        with case((topology, shards, optimizer)):
            for result in (of_rank[index] for of_rank in results):
                for name in ("parameters", "gradients", "optimizer", "outer", "messages"):
                    assert result[name] == pytest.approx(expected[name], rel=0.01, abs=1e-4), name
            sent = sum(of_rank[index]["sent"] for of_rank in results) / n
            assert sent == pytest.approx(sent_mb(there, built), rel=0.01)


def test_shards_divide_memory_and_messages() -> None:
    whole, shards = cluster(hosts=4, payload_mb=80.0), cluster(hosts=4, payload_mb=80.0, shards=8)
    for topology in (None, build("ring", 4), build("one_peer_exponential", 4)):
        one, other = (rank_memory(there, "accumadamw", topology, ROUNDS) for there in (whole, shards))
        assert sum(other.values()) == sum(one.values()) / 8
        assert sent_mb(shards, topology) == sent_mb(whole, topology) / 8
    # parameters, gradients, three vectors of state, anchors and outer momenta, two neighbours on a ring
    memory = rank_memory(shards, "accumadamw", build("ring", 4), ROUNDS)
    assert sum(memory.values()) == (1 + 1 + 3 + 2 + 2) * 10.0


def test_shards_leave_what_hosts_send_to_others_but_send_inside_on_more_links() -> None:
    slow = {"hosts": 2, "workers_per_host": 2, "payload_mb": 100.0, "intra_gbps": 10.0, "inter_gbps": 1000.0}
    whole, shards = (plan(cluster(shards=s, **slow), ["one_peer_ring"], steps=60).frame for s in (1, 4))
    assert shards.step_ms[0] < 0.5 * whole.step_ms[0]
    between = {"hosts": 4, "payload_mb": 100.0}
    whole, shards = (plan(cluster(shards=s, **between), ["ring"], steps=60).frame for s in (1, 4))
    assert list(shards.step_ms) == list(whole.step_ms)
    assert list(shards.sent_mb) == [mb / 4 for mb in whole.sent_mb]
    assert list(shards.memory_gb) == [gb / 4 for gb in whole.memory_gb]
