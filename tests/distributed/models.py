"""Small models, each with one feature that a data-parallel wrapper can get wrong. All map to 3 outputs."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def aligned() -> nn.Module:
    """Return a model with one weight of 16 x 16 and one of 3 x 16: 1,216 bytes with no padding."""
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))


class Backwards(nn.Module):
    """Layers that are registered in another order than they are used; inputs [16]."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(8, 3), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def conv_bn() -> nn.Module:
    """Return a model with convolutions in channels_last and BatchNorm statistics; inputs [3, 6, 6]."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(54, 3)
    )
    return model.to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


class Tied(nn.Module):
    """The first and the last layer are one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 5), nn.Linear(5, 8)
        self.last.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.middle(self.first(x).tanh()).tanh()))


class Unused(nn.Module):
    """`never` gets no gradient at all, `late` none before step 5, `some` on even workers only."""

    conditional = True

    def __init__(self) -> None:
        super().__init__()
        self.never, self.late, self.some, self.always = (nn.Linear(5, 3) for _ in range(4))

    def forward(self, x: Tensor, worker: int, step: int) -> Tensor:
        y = self.always(x)
        if step >= 5:
            y = y + self.late(x).tanh()
        if worker % 2 == 0:
            y = y + self.some(x).tanh()
        return y


class MixedDtypes(nn.Module):
    """A float32 layer, one in bfloat16 with a statistic in bfloat16, and one in float32 again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 16), nn.Linear(16, 3)
        self.middle = nn.Linear(16, 16).bfloat16()
        self.register_buffer("statistic", torch.zeros(16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).tanh().bfloat16()).tanh()
        if self.training:
            self.statistic.lerp_(x.detach().mean(0), 0.5)
        return self.head(x.float())


class Recurrent(nn.Module):
    """Inputs [time, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Checkpointed(nn.Module):
    """Recomputes its activations in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp()[:4], nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="aot_eager")
    return model


def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="aot_eager")
