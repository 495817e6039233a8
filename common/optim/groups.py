"""Parameter groups with and without weight decay, decided by the type of the module that owns a parameter.

Neither shape nor name would do: a norm layer is not always called 'bn' (ResNet's downsample branch), and a
one-dimensional parameter is not always a bias or part of a norm.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from common.optim.checks import require_non_negative

NORM_TYPES: tuple[type[nn.Module], ...] = (
    _NormBase,  # BatchNorm, SyncBatchNorm, InstanceNorm, of all dimensions, lazy ones too
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def decay_groups(
    module: nn.Module,
    weight_decay: float,
    norm_types: tuple[type[nn.Module], ...] = NORM_TYPES,
    decay_biases: bool = False,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: what decays with `weight_decay`, and what does not (0.0).

    No decay for the parameters of norm layers (modules of `norm_types`; pass yours too) and, unless `decay_biases`, for
    biases: parameters whose attribute is 'bias', '*_bias' (attention's in_proj_bias) or 'bias_*' (bias_ih_l0 of the
    recurrent layers). A tied parameter counts once, and without decay if any of its owners exempts it. Frozen
    parameters are left out, and so is a group that would be empty. Order in a group is that of `module.parameters()`.

    Raises ValueError for a weight decay that is not a finite number >= 0.
    """
    require_non_negative("decay_groups", "weight_decay", weight_decay)
    exempt = {
        param
        for owner in module.modules()
        for name, param in owner.named_parameters(recurse=False)
        if isinstance(owner, norm_types) or (_is_bias(name) and not decay_biases)
    }
    trainable = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param not in exempt], "weight_decay": weight_decay},
        {"params": [param for param in trainable if param in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_bias(name: str) -> bool:
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")
