"""Decay groups go by module type and by what a bias is called, never by shape or by the norm's name."""

import pytest
import torch
from torch import nn

from common.optim import decay_groups


def names_of(module, groups):
    """One set of parameter names for each group."""
    names = {param: name for name, param in module.named_parameters()}
    return [{names[param] for param in group["params"]} for group in groups]


class ResidualBlock(nn.Module):
    """ResNet's block with a downsample branch, whose norm is an unnamed entry of a Sequential."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 3)


NORMS = {"bn1.weight", "bn1.bias", "downsample.1.weight", "downsample.1.bias"}


@pytest.mark.parametrize(
    ("module", "no_decay", "exempt"),
    [
        (ResidualBlock(), "norms_and_biases", {*NORMS, "fc.bias"}),
        (ResidualBlock(), "norms", NORMS),
        # As in the ImageNet code of arXiv 2410.11998, whose ResNet calls the norm of the branch downsample.1.
        (ResidualBlock(), "named_bn_or_bias", {*NORMS, "fc.bias"} - {"downsample.1.weight"}),
        (ResidualBlock(), "nothing", set()),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "norms", set()),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "norms_and_biases",
            {"in_proj_bias", "out_proj.bias", "bias_k", "bias_v"},
        ),
        (nn.LSTM(3, 4), "norms", set()),
        (nn.LSTM(3, 4), "norms_and_biases", {"bias_ih_l0", "bias_hh_l0"}),
    ],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, nn.Module) else len(value) if isinstance(value, set) else value
    ),
)
def test_what_does_not_decay(module, no_decay, exempt):
    groups = decay_groups(module, 0.1, no_decay=no_decay)
    everything = {name for name, _ in module.named_parameters()}
    assert names_of(module, groups) == [everything - exempt, exempt][: len(groups)]
    assert [group["weight_decay"] for group in groups] == ([0.1, 0.0] if exempt else [0.1])


@pytest.mark.parametrize("value", [-0.1, float("nan"), "0.1", None])
def test_bad_arguments(value):
    with pytest.raises(ValueError, match=r"decay_groups: weight_decay=.*: expected a finite number >= 0"):
        decay_groups(nn.Linear(1, 1), value)
    with pytest.raises(ValueError, match="no_decay='bias': expected one of norms_and_biases, norms, named_bn_or_bias"):
        decay_groups(nn.Linear(1, 1), 0.1, no_decay="bias")


@pytest.mark.parametrize(
    "norm",
    [nn.SyncBatchNorm(4), nn.LayerNorm((2, 4)), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(4)],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_of_torch(norm):
    module = nn.Sequential(nn.Linear(4, 4, bias=False), norm)
    decay, no_decay = names_of(module, decay_groups(module, 0.1))
    assert decay == {"0.weight"}
    assert no_decay == {f"1.{name}" for name, _ in norm.named_parameters()}


def test_one_dimensional_weight_decays_and_two_dimensional_bias_does_not():
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(3))
    module.bias = nn.Parameter(torch.ones(3, 3))
    assert names_of(module, decay_groups(module, 0.1)) == [{"scale"}, {"bias"}]


def test_tied_weights_once_in_the_order_of_parameters():
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    module[2].weight = module[0].weight
    groups = decay_groups(module, 0.1)
    assert [id(p) for p in groups[0]["params"]] == [id(module[0].weight), id(module[1].weight)]
    assert [id(p) for p in groups[1]["params"]] == [id(module[1].bias)]
    torch.optim.AdamW(groups)  # torch warns of or refuses duplicates


def test_tied_parameter_does_not_decay_if_one_owner_is_a_norm():
    module = nn.Sequential(nn.LayerNorm(4, bias=False), nn.PReLU(4))
    module[1].weight = module[0].weight
    groups = decay_groups(module, 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.0)]


def test_frozen_parameters_and_empty_groups_are_left_out():
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].requires_grad_(False)
    (group,) = decay_groups(module, 0.1)
    assert group["weight_decay"] == 0.0
    assert names_of(module, [group]) == [{"1.weight", "1.bias"}]
    module.requires_grad_(False)
    assert decay_groups(module, 0.1) == []
    (group,) = decay_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert group["weight_decay"] == 0.1


def test_own_norm_type():
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

    module = nn.Sequential(nn.Linear(2, 2, bias=False), ScaleNorm())
    assert names_of(module, decay_groups(module, 0.1)) == [{"0.weight", "1.gain"}]
    assert names_of(module, decay_groups(module, 0.1, norm_types=(ScaleNorm,))) == [{"0.weight"}, {"1.gain"}]
