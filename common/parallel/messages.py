"""Messages narrower than the parameters: what is sent in place of x, and what is remembered of the difference.

With q the rounded value, a worker adds w_ij (q_j - q_i): a doubly stochastic matrix still conserves the mean.
8 bits are too few for that alone. There a worker sends q(x + e) and keeps e <- x + e - q(x + e), so that what one
message leaves out a later one makes up for (error feedback; DeepSqueeze, Tang et al., 2019).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 1024  # elements that share a scale in 8 bits


class Message:
    """One message about a chunk x [numel], as it travels, and its value.

    dtype: float: x rounded to it. int8: see `quantize`, with the error [numel] of the messages before
    tensor: 1-D, what is sent; a peer's message has the same size and dtype
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, error: Tensor | None) -> None:
        self._numel, self._dtype, self._out = x.numel(), dtype, x.dtype
        self._error, self._left_out = error, None
        wide = x if error is None else x + error
        self.tensor = quantize(wide) if dtype == torch.int8 else wide.to(dtype)

    def decode(self, received: Tensor) -> Tensor:
        """The value [numel] of a message, in the dtype of x."""
        if self._dtype == torch.int8:
            return dequantize(received, self._numel).to(self._out)
        return received.to(self._out)

    def merge_(self, x: Tensor, received: Iterable[tuple[Tensor, float]]) -> None:
        """x <- x + sum_j w_j (q_j - q) for (message of j, w_j), in place; x as it was when this message was made."""
        value = self.decode(self.tensor)
        if self._error is not None:
            self._left_out = (x + self._error).sub_(value)
        for tensor, weight in received:
            x.add_(self.decode(tensor).sub_(value), alpha=weight)

    def settle(self) -> None:
        """The round is over: what this message left out is the next one's error."""
        if self._error is not None and self._left_out is not None:
            self._error.copy_(self._left_out)


def message_layout(numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(elements, dtype) of a message about so many elements."""
    return (4 * -(-numel // BLOCK) + numel, torch.uint8) if dtype == torch.int8 else (numel, dtype)


def quantize(x: Tensor) -> Tensor:
    """x [N] float -> uint8 [4 ceil(N / BLOCK) + N]: a float32 scale for each block, then integers of -127..127.

    Within half a scale of x, which is the block's largest magnitude / 127.
    """
    blocks = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(127)
    # A block of zeros has scale 0: any divisor gives its integers.
    integers = blocks.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), integers.view(-1)[: x.numel()].view(torch.uint8)])


def dequantize(message: Tensor, numel: int) -> Tensor:
    """What `quantize` made of x [numel] -> float32 [numel]."""
    count = -(-numel // BLOCK)
    scales = message[: 4 * count].view(torch.float32)
    return message[4 * count :].view(torch.int8).float().mul_(scales.repeat_interleave(BLOCK)[:numel])
