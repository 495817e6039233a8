"""Networks: sizes, layout, initialisation, decay groups, compilation; torchvision beside any build of torch."""

import builtins
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cnn
from cnn.config import ResNet, ResNetCifar, ResNetDigits, TorchvisionModel
from cnn.model import PaddedShortcut, SmallResNet, build_model
from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.optim import AccumAdam, decay_groups
from common.simulate import simulate
from tests.waiting import LIMIT_S

SHIM = str(Path(cnn.__file__).with_name("torchvision_shim.py"))
RESNET50 = ResNet(name="resnet50", channels_last=True)


def test_resnet50_has_its_parameters_and_decays_weights_only() -> None:
    model = build_model(RESNET50, 3, 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    decay, rest = decay_groups(model, 0.5)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert count(rest["params"]) == 2 * 26_560 + 1000  # scale and shift of each channel, and the classifier's bias
    assert len(decay["params"]) == 53 + 1
    assert len(rest["params"]) == 2 * 53 + 1  # 4 of the 53 norms are called downsample.1, not bn


def count(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


@pytest.mark.parametrize("channels_last", [True, False])
def test_weights_are_torchvisions_in_the_chosen_layout(channels_last: bool) -> None:
    from cnn.torchvision_shim import torchvision

    torch.manual_seed(3)
    expected = torchvision.models.resnet18(weights=None, num_classes=7)
    torch.manual_seed(3)
    model = build_model(ResNet(name="resnet18", channels_last=channels_last), 3, 7)
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.dim() == 4 and p.shape[2] > 1:  # other weights are both
            assert p.is_contiguous(memory_format=torch.channels_last) == channels_last
            assert p.is_contiguous() != channels_last
    images = torch.randn(2, 3, 64, 64)
    assert torch.allclose(model.eval()(images), expected.eval()(images), rtol=1e-4, atol=1e-4)


def test_any_network_of_torchvision() -> None:
    config = compose_config("cnn", ["model=torchvision", "model.architecture=googlenet"]).model
    model = build_model(config, 3, 5)
    assert model.train()(torch.randn(2, 3, 64, 64)).shape == (2, 5)  # a tensor, without auxiliary heads


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.architecture=resnt50"], "model.architecture='resnt50': no such network in torchvision; did you mean"),
        (["model.architecture=fasterrcnn_resnet50_fpn"], "no such network in torchvision"),
        (["model.architecture=???"], "model.architecture"),
        (["model.architecture=resnet18", "model.channels_last=maybe"], "model.channels_last='maybe'"),
    ],
)
def test_what_is_no_network_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config("cnn", ["model=torchvision", *overrides])
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["resnet50", "torchvision"])
def test_images_of_one_channel_are_refused(name: str) -> None:
    config = RESNET50 if name == "resnet50" else TorchvisionModel(name=name, architecture="vgg11", channels_last=True)
    with pytest.raises(ConfigError, match=rf"model={name}: takes images of 3 channels.* have 1; .*resnet_digits"):
        build_model(config, 1, 10)


# -- He et al. (2016), section 4.2


@pytest.mark.parametrize("depth", [20, 110])
def test_resnets_for_cifar_have_the_layers_and_parameters_of_their_table(depth: int) -> None:
    """6n + 2 weighted layers: a convolution, 2n of each width, a classifier; parameters in millions: their Table 6."""
    model = build_model(ResNetCifar(name="resnet_cifar", depth=depth), 3, 10)
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert len(layers) == depth
    millions = count([*model.parameters()]) / 1e6
    assert round(millions, 2 if depth < 100 else 1) == {20: 0.27, 110: 1.7}[depth]
    decay, _ = decay_groups(model, 5e-4)
    # What the second paper's CIFAR-10 script decays: parameters with more than one dimension.
    assert {id(p) for p in decay["params"]} == {id(p) for p in model.parameters() if p.dim() > 1}


def test_a_resnet_for_cifar_halves_the_image_twice() -> None:
    model = build_model(ResNetCifar(name="resnet_cifar", depth=20), 3, 10)
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda *call: sizes.append(tuple(call[2].shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_the_shortcut_without_parameters_takes_every_second_pixel_and_adds_zeros() -> None:
    images = torch.randn(2, 3, 6, 6)
    out = PaddedShortcut(3, 5, 2)(images)
    assert out.shape == (2, 5, 3, 3)
    assert torch.equal(out[:, 1:4], images[:, :, [0, 2, 4]][..., [0, 2, 4]])
    assert not out[:, [0, 4]].any()


def test_resnets_for_cifar_begin_with_weights_scaled_by_their_inputs() -> None:
    torch.manual_seed(0)
    model = build_model(ResNetCifar(name="resnet_cifar", depth=8), 3, 10)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            inputs = module.weight[0].numel()
            deviation = (2 / inputs) ** 0.5
            assert module.weight.std().item() == pytest.approx(deviation, rel=4 / module.weight.numel() ** 0.5)


def test_group_norm_replaces_every_batch_norm() -> None:
    batch, group = (build_model(ResNetDigits(name="resnet_digits", width=4, norm=n), 1, 10) for n in ("batch", "group"))
    norms = [module for module in group.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == sum(isinstance(module, nn.BatchNorm2d) for module in batch.modules())
    assert {norm.num_groups for norm in norms} == {2}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in group.modules())
    assert not list(group.buffers())
    assert count(list(group.parameters())) == count(list(batch.parameters()))


@pytest.mark.parametrize(("depth", "expected"), [(57, r"6n \+ 2, such as 20"), (2, "greater than or equal to 8")])
def test_a_depth_that_does_not_exist_is_refused(depth: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.depth={depth}: .*{expected}"):
        compose_config("cnn", ["model=resnet_cifar", f"model.depth={depth}"])


# -- compilation


def batches(workers: int, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(workers)] for _ in range(steps)
    ]


def trained(compiled: bool) -> tuple[Tensor, list[nn.Module]]:
    """Losses [steps, workers] of a few gossip steps of two workers, and their bare modules."""
    torch.manual_seed(0)
    # Not fewer channels: with AVX2, oneDNN 3.12 writes past the weight gradient of a strided 1 x 1 convolution of 4.
    module = SmallResNet(3, 10, width=8).to(memory_format=torch.channels_last)
    replicas = list(simulate(module, 2, topology="one_peer_exponential"))
    if compiled:
        for replica in replicas:
            replica.module.compile(backend="aot_eager")  # the same graphs as the default, without generating code
    optimizers = [
        replica.attach(AccumAdam(decay_groups(replica.module, 1e-4), lr=1e-3, accumulation_steps=2))
        for replica in replicas
    ]
    losses = []
    for step in batches(2, 2):
        for replica, (images, labels) in zip(replicas, step, strict=True):
            loss = F.cross_entropy(replica(images), labels, label_smoothing=0.1)
            loss.backward()
            losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).view(-1, 2), [replica.module for replica in replicas]


@pytest.mark.slow
def test_compiled_channels_last_network_trains_alike() -> None:
    losses, modules = trained(compiled=False)
    compiled_losses, compiled_modules = trained(compiled=True)
    assert torch.allclose(compiled_losses, losses, rtol=0, atol=1e-4)
    assert losses[0, 0] != losses[-1, 0]
    for module, other in zip(compiled_modules, modules, strict=True):
        assert module._compiled_call_impl is not None
        for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-4), name
            assert p.stride() == q.stride(), name


# -- torchvision


def test_operators_are_declared_where_the_plain_import_fails_only() -> None:
    plain = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, timeout=LIMIT_S)
    from cnn.torchvision_shim import declared

    assert (declared is None) == (plain.returncode == 0)
    from torchvision.transforms import v2

    image = torch.arange(2 * 4 * 4, dtype=torch.uint8).view(2, 4, 4)
    assert torch.equal(v2.RandomHorizontalFlip(p=1.0)(image), image.flip(-1))


@pytest.mark.parametrize("works", [True, False])
def test_the_shim_leaves_an_import_alone_that_works_or_fails_otherwise(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    original, stub = builtins.__import__, ModuleType("torchvision")

    def fake(name: str, *args: object) -> ModuleType:
        if name != "torchvision":
            return original(name, *args)
        if works:
            return stub
        raise RuntimeError("a broken installation")

    monkeypatch.setattr(builtins, "__import__", fake)
    if works:
        shim = runpy.run_path(SHIM)
        assert (shim["torchvision"], shim["declared"]) == (stub, None)
    else:
        with pytest.raises(RuntimeError, match="a broken installation"):
            runpy.run_path(SHIM)
