"""Check 7: ranks that exchange messages train as the simulator does, in every way to communicate."""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.dtensors import whole
from common.optim import AccumAdamW
from common.parallel import DataParallel, DecentralizedDataParallel, Outer
from common.parallel.collectives import gather_objects
from common.simulate import simulate
from common.topology import NAMES
from common.training.sharding import shard
from scripts.gpu_check.outcome import FailedError, Machine, SkippedError
from scripts.gpu_check.processes import GROUP_TIMEOUT_S, open_group, run_ranks

STEPS = {"cuda": 50, "cpu": 12}
SIZES = (2, 4, 5, 7, 8)  # numbers of workers; the largest that fits sees every case
BUCKET_MB = 0.002  # small, so that a vector is several buckets
SEED, FEATURES, WIDTH, OUTPUTS, BATCH = 7, 8, 40, 4, 8
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "foreach": lambda p: AccumAdamW(p, lr=0.01, eps=1e-4, weight_decay=0.1, accumulation_steps=4),
    "fused": lambda p: AccumAdamW(p, lr=0.01, eps=1e-4, weight_decay=0.1, accumulation_steps=4, fused=True),
}
OUTER = Outer(lr=0.4, momentum=0.5)
# (parameters, messages): the largest allowed difference; parameters are of the order of 1.
TOLERANCES = {
    ("float32", None): 5e-4,
    ("bfloat16", None): 0.06,
    ("float32", "bfloat16"): 0.04,
    ("float32", "float16"): 0.01,
    ("float32", "int8"): 0.04,
}


@dataclass(frozen=True)
class Case:
    """A way to communicate. transport and message_dtype are unknown to the simulator.

    rounds: with local steps and an outer optimizer (local_steps, merge_after, fragments); None: without
    shards: ranks that share out a worker's parameters (FSDP2); all see the worker's batches
    """

    topology: str
    workers_per_host: int = 1
    optimizer: str = "momentum"
    dtype: str = "float32"
    order: str = "awc"
    phases: str = "aligned"
    transport: str = "auto"
    message_dtype: str | None = None
    rounds: tuple[int, int, int] | None = None
    shards: int = 1

    @property
    def local(self) -> dict[str, Any]:
        """The arguments that concern local steps."""
        if self.rounds is None:
            return {}
        return {**dict(zip(("local_steps", "merge_after", "fragments"), self.rounds, strict=True)), "outer": OUTER}

    @property
    def simulated(self) -> "Case":
        """The same as far as the simulator knows it."""
        return replace(self, transport="auto", message_dtype=None)

    @property
    def tolerance(self) -> float:
        """The largest allowed difference of a parameter."""
        return TOLERANCES[self.dtype, self.message_dtype]

    def module(self, device: str) -> nn.Module:
        """Return the model, equal on all ranks."""
        torch.manual_seed(SEED)
        layers = [nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)]
        return nn.Sequential(*layers).to(device, getattr(torch, self.dtype))

    def part(self, device: str) -> nn.Module:
        """Return what a rank holds of the model."""
        module = self.module(device)
        if self.shards > 1:
            shard(
                module, [layer for layer in module if isinstance(layer, nn.Linear)], self.shards, torch.device(device)
            )
        return module

    def loss(self, model: nn.Module, worker: int, step: int) -> Tensor:
        """Return the loss of a worker's batch; workers disagree about the targets."""
        generator = torch.Generator().manual_seed(1 + worker + 1000 * step)
        first = next(model.parameters())
        inputs, noise = (torch.randn(BATCH, size, generator=generator) for size in (FEATURES, OUTPUTS))
        targets = (noise + worker).to(first)
        return (model(inputs.to(first)) - targets).square().mean()

    def train(self, models: Sequence[DataParallel], steps: int) -> list[Tensor]:
        """Train the workers of this process; return each one's parameters as a vector [P] in float64 on the CPU.

        Collective where they are sharded.
        """
        optimizers = [model.attach(OPTIMIZERS[self.optimizer](model.parameters())) for model in models]
        for step in range(steps):
            for model in models:
                self.loss(model, model.worker, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        vectors = [torch.cat([whole(p.detach()).double().flatten().cpu() for p in m.parameters()]) for m in models]
        for model in models:
            model.close()
        return vectors


class Difference(NamedTuple):
    """The largest difference of a parameter between ranks and simulated workers."""

    case: Case
    n: int
    value: float


def check(machine: Machine) -> str:
    """Compare every case on the largest number of workers, a selection on the others and where a GPU is shared.

    Quick: a selection on the largest number.
    """
    probe(machine)
    sizes = [n for n in SIZES if n <= machine.ranks][-1 if machine.quick else 0 :]
    differences = []
    for n in sizes:
        every = n == sizes[-1] and not (machine.quick or machine.shares_gpu)
        differences += compare(machine, n, possible(every_case(n) if every else some_cases(n), n))
    fp32 = max(d.value for d in differences if d.case.tolerance == TOLERANCES["float32", None])
    shared = ", ranks share a GPU" if machine.shares_gpu else ""
    numbers = ", ".join(map(str, sizes))
    return f"{len(differences)} cases on {numbers} ranks{shared}, fp32 parameters differ by at most {fp32:.1e}"


def probe(machine: Machine) -> None:
    """Raise SkippedError if several ranks cannot share the only GPU."""
    if machine.shares_gpu:
        try:
            run_ranks(_all_reduce, 2, machine, timeout_s=90)
        except FailedError as error:
            raise SkippedError(f"needs 2 GPUs, NCCL does not let ranks share one here ({error})") from error


def every_case(n: int) -> list[Case]:
    """Return all combinations of topology, transport, dtypes, order and phases; optimizers and hosts take turns."""
    axes = (NAMES, TOLERANCES, ("awc", "atc"), ("aligned", "staggered"), ("auto", "send_recv", "subgroup"))
    return local_cases(n) + sharded_cases(n) + _cases(n, itertools.product(*axes))


def some_cases(n: int) -> list[Case]:
    """Return every topology with both orders, the other choices taking turns."""
    dtypes, transports = itertools.cycle(TOLERANCES), itertools.cycle(("auto", "send_recv", "subgroup", "auto"))
    chosen = (
        (topology, next(dtypes), order, "staggered" if topology == "aer" and order == "awc" else "aligned", transport)
        for topology, order, transport in zip(
            *zip(*itertools.product(NAMES, ("awc", "atc")), strict=True), transports, strict=False
        )
    )
    plain = [Case(topology, _hosts(n)[-1], optimizer="fused") for topology in NAMES]  # auto, fp32
    return plain + local_cases(n) + sharded_cases(n) + _cases(n, chosen)


def local_cases(n: int) -> list[Case]:
    """Return local steps merged at once, late and a round late, by fragments, and at the end of a round."""
    late = [(4, 1, 1), (4, 2, 1), (4, 4, 1), (6, 2, 3)]
    names = ("complete", "one_peer_exponential", "aer")
    cases = [Case(name, _hosts(n)[-1], "foreach", rounds=rounds) for name in names for rounds in late]
    return cases + [Case(name, _hosts(n)[-1], order="atc", rounds=(4, 0, 1)) for name in names]


def sharded_cases(n: int) -> list[Case]:
    """Return workers of two ranks that share out the parameters, with every optimizer, and with local steps."""
    if n % 2:
        return []
    names = ("complete", "one_peer_exponential", "aer")
    cases = [Case(name, optimizer=optimizer, shards=2) for name in names for optimizer in OPTIMIZERS]
    return [*cases, Case("one_peer_exponential", rounds=(4, 2, 1), shards=2)]


def possible(cases: Sequence[Case], n: int) -> list[Case]:
    """Return the cases that exist for n ranks, each once."""
    exists: dict[Case, bool] = {}
    for case in cases:
        if case.simulated not in exists:
            try:
                simulated(case, n, "cpu", steps=0)
                exists[case.simulated] = True
            except (ValueError, TypeError):
                exists[case.simulated] = False
    return [case for case in dict.fromkeys(cases) if exists[case.simulated]]


def compare(
    machine: Machine, n: int, cases: Sequence[Case], in_rank: Callable[..., tuple] | None = None
) -> list[Difference]:
    """Train the cases on n ranks and simulated, and return the differences.

    in_rank: what ranks run instead of `train_in_rank`

    Raises FailedError naming the worst case if one differs by more than its tolerance.
    """
    answers = run_ranks(in_rank or train_in_rank, n, machine, tuple(cases), timeout_s=60 + 10 * len(cases))
    expected: dict[Case, list[Tensor]] = {}
    for _, simulations in answers:
        expected |= simulations
    differences = []
    for index, case in enumerate(cases):
        of_ranks = [worker for worker in expected[case.simulated] for _ in range(case.shards)]
        pairs = zip((vectors[index] for vectors, _ in answers), of_ranks, strict=True)
        value = max((got - want).abs().max().nan_to_num(torch.inf).item() for got, want in pairs)
        differences.append(Difference(case, n, value))
    wrong = [d for d in differences if d.value > d.case.tolerance]
    if wrong:
        for difference in wrong:
            print(difference)
        worst = max(wrong, key=lambda d: d.value / d.case.tolerance)
        raise FailedError(
            f"{len(wrong)} of {len(cases)} cases on {n} ranks; {worst.case} differs by {worst.value:.1e}, expected at "
            f"most {worst.case.tolerance:g}"
        )
    return differences


def train_in_rank(
    rank: int, n: int, machine: Machine, cases: Sequence[Case]
) -> tuple[list[Tensor], dict[Case, list[Tensor]]]:
    """Return this rank's parameters [P] after each case, and the simulations that fall to this rank."""
    steps = STEPS[machine.device]
    vectors = []
    with tempfile.TemporaryDirectory() as mine:
        meeting = gather_objects(mine)[0]
        for number, case in enumerate(cases):
            # The communicators of a case take memory until its groups are destroyed.
            dist.barrier()
            dist.destroy_process_group()
            open_group(f"{meeting}/{number}", machine, rank, n)
            if rank == 0:
                print(f"on {n} ranks: {case}", flush=True)
            model = DecentralizedDataParallel(
                case.part(machine.device),
                case.topology,
                case.order,
                case.shards,
                workers_per_host=case.workers_per_host,
                bucket_mb=BUCKET_MB,
                transport=case.transport,
                message_dtype=getattr(torch, case.message_dtype) if case.message_dtype else None,
                phases=case.phases,
                timeout_s=GROUP_TIMEOUT_S,
                **case.local,
            )
            vectors += case.train([model], steps)
            machine.settle()
        dist.barrier()  # nobody removes the folder before all have left it
    share = list(dict.fromkeys(case.simulated for case in cases))[rank::n]
    return vectors, {case: simulated(case, n, machine.device, steps) for case in share}


def simulated(case: Case, n: int, device: str, steps: int) -> list[Tensor]:
    """Return the parameters [P] of the simulated workers of n ranks. Raises ValueError if the case does not exist."""
    replicas = simulate(
        case.module(device),
        n // case.shards,
        "decentralized",
        case.topology,
        case.workers_per_host,
        case.order,
        bucket_mb=BUCKET_MB,
        phases=case.phases,
        **case.local,
    )
    return case.train(replicas, steps)


def _cases(n: int, choices: object) -> list[Case]:
    optimizers, hosts = itertools.cycle(OPTIMIZERS), itertools.cycle(_hosts(n))
    return [
        Case(topology, next(hosts), next(optimizers), dtype, order, phases, transport, message_dtype)
        for topology, (dtype, message_dtype), order, phases, transport in choices
    ]


def _hosts(n: int) -> list[int]:
    """Return the numbers of workers on a host that are tried."""
    return [1, n // 2] if n > 2 and n % 2 == 0 else [1]


def _all_reduce(rank: int, n: int, machine: Machine) -> None:
    total = torch.ones((), device=machine.device)
    dist.all_reduce(total)
    if total.item() != n:
        raise ValueError(f"a sum of ones over {n} ranks is {total.item()}")
