"""A mode in which nothing may wait for the device, to be tried on the CPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# What `.item()`, `float(tensor)`, `if tensor:`, indexing with a mask and the like come down to.
WAITING = (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2)


class NoHostSync(TorchDispatchMode):
    """Raise AssertionError where the host would read what a device computes, or take part in a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        assert func.namespace != "c10d", f"{func} is a collective"
        return func(*args, **(kwargs or {}))
