"""Muon for the matrices of hidden layers and AdamW for the rest, PyTorch's two optimizers in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common.optim.foreach import loss_of


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` as one optimizer: one step, one schedule, one state dict.

    Groups and state are shared with the two, Muon's groups first; a group that is added later goes to AdamW. As one
    optimizer they follow one decision of a gradient scaler, and `attach` sees one step in an update.
    """

    _parts: tuple[Optimizer, ...] = ()

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = (muon, adamw)
        for part in self._parts:
            self.state.update(part.state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy keeps."""
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` loaded."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to AdamW, whose defaults fill in missing options."""
        super().add_param_group(param_group)
        if self._parts:  # else the group is already one of theirs
            self._parts[-1].add_param_group(self.param_groups[-1])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what `closure` returns, if given."""
        loss = loss_of(closure)
        for part in self._parts:
            part.step()
        return loss

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the trainable 2-D parameters within lists of layers (`nn.ModuleList`), except embeddings'.

    Parameters outside these lists, such as a transformer's embeddings and output layer, are not hidden.
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    embedded = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    found = {p for layers in lists for p in layers.parameters() if p.ndim == 2 and p.requires_grad}
    return found - embedded
