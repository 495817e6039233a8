"""MuonAdamW is PyTorch's Muon and AdamW, bit for bit, and the matrices between a model's ends are Muon's."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.config.config import ConfigError
from common.config.optimization import MuonConfig
from common.optim import Cosine, MuonAdamW, hidden_matrices
from common.parallel import DecentralizedDataParallel
from common.training.optimization import build_optimizer

CONFIG = MuonConfig(
    name="muon",
    lr=0.02,
    lr_batch=None,
    momentum=0.9,
    nesterov=True,
    adjust_lr="match_rms_adamw",
    adamw_lr=0.005,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
)
STEPS = 8


class Language(nn.Module):
    """Embedding, two hidden layers with a norm and a table each, and an output layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        layers = [nn.ModuleDict({"norm": nn.LayerNorm(8), "linear": nn.Linear(8, 8)}) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.layers[1]["table"] = nn.Embedding(11, 8)
        self.output = nn.Linear(8, 11)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer["linear"](layer["norm"](x)))
        return self.output(x + self.layers[1]["table"](tokens))


def model(seed: int = 3) -> Language:
    torch.manual_seed(seed)
    return Language()


def backward(module: nn.Module, step: int) -> None:
    tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(module(tokens), tokens.roll(1)).backward()


def separate(module: Language) -> list[Optimizer]:
    """Return the two optimizers of PyTorch as a plain script would build them."""
    norms = [p for layer in module.layers for p in layer["norm"].parameters()]
    linears = [layer["linear"] for layer in module.layers]
    biases = [*(linear.bias for linear in linears), module.output.bias]
    groups = [
        {"params": [module.tokens.weight, module.layers[1]["table"].weight, module.output.weight]},
        {"params": [*norms, *biases], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            [linear.weight for linear in linears], 0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, 0.005, betas=(0.9, 0.95), weight_decay=0.1),
    ]


def plain(steps: int) -> Language:
    module = model()
    optimizers = separate(module)
    schedules = [LambdaLR(optimizer, Cosine(total_steps=STEPS, warmup_steps=2)) for optimizer in optimizers]
    for step in range(steps):
        backward(module, step)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return module


class Run:
    """The configured optimizer on a single worker."""

    def __init__(self) -> None:
        self.module = model()
        self.model = DecentralizedDataParallel(self.module, "complete")
        self.optimizer = self.model.attach(build_optimizer(CONFIG, CONFIG.lr, self.module))
        self.schedule = LambdaLR(self.optimizer, Cosine(total_steps=STEPS, warmup_steps=2))

    def train(self, steps: Iterator[int] | range) -> "Run":
        for step in steps:
            backward(self.model, step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return self

    @property
    def parts(self) -> list[dict]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name


def test_one_worker_is_muon_and_adamw_of_pytorch_bit_for_bit() -> None:
    run = Run().train(range(STEPS))
    assert isinstance(run.optimizer, MuonAdamW)
    assert run.model.clock == STEPS
    assert_same(run.module, plain(STEPS))


def test_continues_exactly_from_a_file_of_plain_values() -> None:
    file = io.BytesIO()
    torch.save(Run().train(range(5)).parts, file)
    file.seek(0)
    run = Run().train(range(2))  # what it held is forgotten
    for part, saved in zip((run.model, run.optimizer, run.schedule), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(copy.deepcopy(saved))
    assert_same(run.train(range(5, STEPS)).module, plain(STEPS))


def test_two_optimizers_keep_their_state_when_they_become_one() -> None:
    parts = [torch.optim.Muon([matrix := nn.Parameter(torch.ones(2, 2))], lr=0.1)]
    parts += [torch.optim.AdamW([vector := nn.Parameter(torch.ones(2))], lr=0.1)]
    for optimizer in parts:
        (matrix.sum() + vector.sum()).backward()
        optimizer.step()
    assert MuonAdamW(*parts).state[matrix].keys() == {"momentum_buffer"}
    assert parts[1].state[vector]["step"] == 1


def test_a_copy_trains_alike() -> None:
    runs = [(module := model(), build_optimizer(CONFIG, CONFIG.lr, module))]
    for step in range(4):
        runs += [copy.deepcopy(runs[0])] if step == 2 else []
        for each, optimizer in runs:
            backward(each, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(runs[0][0], runs[1][0])


def test_rates_are_scaled_to_the_batch_together() -> None:
    rates = [group["lr"] for group in build_optimizer(CONFIG, 0.04, model()).param_groups]
    assert rates == pytest.approx([0.04, 0.01, 0.01])
    shared = CONFIG.model_copy(update={"adamw_lr": None})
    assert {group["lr"] for group in build_optimizer(shared, 0.03, model()).param_groups} == {0.03}


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_hidden_layers_are_neither_embeddings_nor_the_output(tied: bool) -> None:
    module = Language(tied)
    hidden = hidden_matrices(module)
    assert {name for name, p in module.named_parameters() if p in hidden} == {
        "layers.0.linear.weight", "layers.1.linear.weight"
    }  # fmt: skip
    module.layers[0]["linear"].weight.requires_grad_(False)
    assert len(hidden_matrices(module)) == 1


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer=muon with a Conv2d: expected a model with matrices in lists"):
        build_optimizer(CONFIG, 0.02, nn.Conv2d(3, 4, 3))


def test_a_closure_runs_once_with_gradients() -> None:
    module, calls = model(), []
    optimizer = build_optimizer(CONFIG, CONFIG.lr, module)

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        backward(module, 0)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert calls == [True]
    assert not torch.equal(module.output.weight, model().output.weight)


def test_groups_that_are_added_are_stepped() -> None:
    module, extra = model(), nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(CONFIG, CONFIG.lr, module)
    optimizer.add_param_group({"params": [extra], "lr": 0.2})
    extra.grad = torch.ones(3)
    optimizer.step()
    assert (extra - 1).abs().min() > 0.1
    assert optimizer.param_groups[-1]["betas"] == CONFIG.betas
