"""Messages narrower than the parameters: rounded values, and the memory of what rounding left out.

With q the rounded value, a worker adds w_ij (q_j - q_i): a doubly stochastic matrix still conserves the mean.
8 bits are too few for that alone: there a worker sends q(x + e) and keeps e <- x + e - q(x + e), so that later
messages make up for what this one leaves out (error feedback; DeepSqueeze, Tang et al., 2019).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from common.parallel.streams import is_queued

BLOCK = 1024  # elements that share a scale in 8 bits


class Message:
    """The message of a chunk x [numel].

    dtype:  float: x rounded to it. int8: see `quantize`, with the error [numel] of earlier messages
    tensor: 1-D, as it travels; a peer's message has the same size and dtype
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, error: Tensor | None) -> None:
        self._numel, self._dtype, self._out = x.numel(), dtype, x.dtype
        self._error, self._left_out = error, None
        wide = x if error is None else x + error
        self.tensor = quantize(wide) if dtype == torch.int8 else wide.to(dtype)

    def decode(self, received: Tensor) -> Tensor:
        """Return the value [numel] of a message, in the dtype of x."""
        if self._dtype == torch.int8:
            return dequantize(received, self._numel).to(self._out)
        return received.to(self._out)

    def merge_(self, x: Tensor, received: Iterable[tuple[Tensor, float]]) -> None:
        """Compute x <- x + sum_j w_j (q_j - q) for (message of j, w_j), in place; x unchanged since this message."""
        value = self.decode(self.tensor)
        if self._error is not None:
            self._left_out = (x + self._error).sub_(value)
        for tensor, weight in received:
            x.add_(self.decode(tensor).sub_(value), alpha=weight)

    def settle(self) -> None:
        """Keep what this message left out as the error of the next one: the round is over."""
        if self._error is not None and self._left_out is not None:
            self._error.copy_(self._left_out)
            if is_queued(self._error.device):  # another stream may have made it, and its memory must not go back yet
                self._left_out.record_stream(torch.cuda.current_stream(self._error.device))


def quantize(x: Tensor) -> Tensor:
    """Turn x [N] float into uint8 [4 ceil(N / BLOCK) + N]: a float32 scale for each block, then integers -127..127.

    Values are within half a scale of x; a scale is the block's largest magnitude / 127.
    """
    blocks = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(127)
    # A block of zeros has scale 0: any divisor gives its integers.
    integers = blocks.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), integers.view(-1)[: x.numel()].view(torch.uint8)])


def dequantize(message: Tensor, numel: int) -> Tensor:
    """Return the float32 [numel] that `quantize` stored."""
    count = -(-numel // BLOCK)
    scales = message[: 4 * count].view(torch.float32)
    return message[4 * count :].view(torch.int8).float().mul_(scales.repeat_interleave(BLOCK)[:numel])
