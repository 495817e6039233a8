"""Parameter groups with and without weight decay, decided by the type of the module that owns a parameter.

Neither shape nor name would do: a norm layer is not always called 'bn' (ResNet's downsample branch), and a
one-dimensional parameter is not always a bias or part of a norm. Published runs that went by name can still be
repeated, see NoDecay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from torch import nn

from common.arguments import require, require_non_negative
from common.torch_internals import NormWithStatistics

NORM_TYPES: tuple[type[nn.Module], ...] = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


# What does not decay. named_bn_or_bias: every parameter with 'bn' or 'bias' in its name, as in the ImageNet code of
# arXiv 2410.11998: in torchvision's ResNets the BatchNorm weights of the downsample branches do decay.
NoDecay = Literal["norms_and_biases", "norms", "named_bn_or_bias", "nothing"]


def decay_groups(
    module: nn.Module,
    weight_decay: float,
    norm_types: tuple[type[nn.Module], ...] = NORM_TYPES,
    no_decay: NoDecay = "norms_and_biases",
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: what decays with `weight_decay`, and what does not (0.0).

    `no_decay` says what does not. Norms are the parameters of norm layers (modules of `norm_types`; pass yours too).
    Biases are parameters whose attribute is 'bias', '*_bias' (attention's in_proj_bias) or 'bias_*' (bias_ih_l0 of the
    recurrent layers). A tied parameter counts once, and without decay if any of its owners exempts it. Frozen
    parameters are left out, and so is a group that would be empty. Groups keep the order of `module.parameters()`.

    Raises ValueError for a weight decay that is not a finite number >= 0, and for an unknown `no_decay`.
    """
    require_non_negative("decay_groups", "weight_decay", weight_decay)
    known = get_args(NoDecay)
    require(no_decay in known, "decay_groups", "no_decay", no_decay, f"one of {', '.join(known)}")
    exempt = set(_exempt(module, norm_types, no_decay))
    trainable = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param not in exempt], "weight_decay": weight_decay},
        {"params": [param for param in trainable if param in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _exempt(module: nn.Module, norm_types: tuple[type[nn.Module], ...], no_decay: NoDecay) -> Iterator[nn.Parameter]:
    """Yield the parameters that do not decay; tied ones may come twice."""
    if no_decay == "named_bn_or_bias":
        names = module.named_parameters(remove_duplicate=False)
        yield from (param for name, param in names if "bn" in name or "bias" in name)
    elif no_decay != "nothing":
        for owner in module.modules():
            for name, param in owner.named_parameters(recurse=False):
                if isinstance(owner, norm_types) or (no_decay == "norms_and_biases" and _is_bias(name)):
                    yield param


def _is_bias(name: str) -> bool:
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")
