"""A wrapper that keeps the bare module's names, in state dicts and elsewhere."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class Bare(nn.Module):
    """Holds `module` and uses its names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(Bare._load_within)
        self.register_load_state_dict_post_hook(Bare._loaded_within)

    @property
    def bare_module(self) -> nn.Module:
        """The module without torch.compile's wrapper, whose names would carry a prefix."""
        return getattr(self.module, "_orig_mod", self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the bare module's state dict, without any prefix."""
        return self.bare_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the bare module's state dict. Every rank must call it: messages in flight are dropped first."""
        self._before_load()
        try:
            return self.bare_module.load_state_dict(state_dict, *args, **kwargs)
        finally:
            self._after_load()  # also after an error, which comes when all that fits was loaded

    def _before_load(self) -> None:
        """Prepare for parameters to be written, on all ranks."""

    def _after_load(self) -> None:
        """Take note of new parameters."""

    # A module that holds the wrapper (as torch.compile's does) saves through `state_dict`, but loads child by child.

    def _load_within(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Let a module that holds this wrapper load: drain, and take the bare names."""
        self._before_load()
        inner = f"{prefix}module." if self.bare_module is self.module else f"{prefix}module._orig_mod."
        own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        state_dict.update((inner + key.removeprefix(prefix), value) for key, value in own.items())

    def _loaded_within(self, _: Any) -> None:
        self._after_load()

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: process groups and optimizer hooks cannot be copied or pickled."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to its process groups and optimizers; "
            "expected model.module (AveragedModel(model.module), copy.deepcopy(model.module)) or model.state_dict()"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the bare module's named parameters."""
        return self.bare_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the bare module's named buffers."""
        return self.bare_module.named_buffers(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return this wrapper, and the bare module's named modules under their bare names."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.bare_module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return the bare module's submodule of that name."""
        return self.bare_module.get_submodule(target)
