"""Rounded messages and what they leave out."""

import math

import pytest
import torch

from common.parallel.gossip.exchange import KINDS, ReceiveBuffers, tag_of
from common.parallel.gossip.hierarchical import Tag
from common.parallel.gossip.messages import BLOCK, Message, dequantize, quantize
from common.parallel.making_groups import UNUSED_TAG


@pytest.mark.parametrize("numel", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_8_bits_are_within_half_a_step_of_each_block(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * torch.arange(1, numel + 1)
    message = quantize(x)
    assert (message.numel(), message.dtype) == (4 * math.ceil(numel / BLOCK) + numel, torch.uint8)
    value = dequantize(message, numel)
    for begin in range(0, numel, BLOCK):
        block, got = x[begin : begin + BLOCK], value[begin : begin + BLOCK]
        assert (block - got).abs().max() <= block.abs().max() / 127 * 0.5001
        largest = block.abs().argmax()
        torch.testing.assert_close(got[largest], block[largest])


@torch.inference_mode()
def test_other_threads_may_write_received_messages() -> None:
    assert not ReceiveBuffers().take(3, torch.float32, torch.device("cpu")).is_inference()


def test_zeros_stay_zeros_beside_other_blocks() -> None:
    x = torch.cat([torch.zeros(BLOCK), torch.full((4,), -3.0)])
    torch.testing.assert_close(dequantize(quantize(x), x.numel()), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_merging_moves_by_the_difference_of_rounded_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(100, generator=generator) for _ in range(2))
    mine, theirs = Message(x, dtype, None), Message(y, dtype, None)
    q, p = mine.decode(mine.tensor), mine.decode(theirs.tensor)
    merged_x, merged_y = x.clone(), y.clone()
    mine.merge_(merged_x, [(theirs.tensor, 0.25)])
    theirs.merge_(merged_y, [(mine.tensor, 0.25)])
    torch.testing.assert_close(merged_x, x + 0.25 * (p - q))
    torch.testing.assert_close(merged_x + merged_y, x + y)
    assert mine.tensor.nbytes == (104 if dtype == torch.int8 else 200)


def test_errors_are_kept_when_the_round_is_over_and_not_before() -> None:
    x, error = torch.linspace(-1, 1, 50), torch.zeros(50)
    sent = torch.zeros(50)
    for step in range(1, 20):
        message = Message(x, torch.int8, error)
        before = error.clone()
        message.merge_(x.clone(), [])
        assert torch.equal(error, before)
        message.settle()
        sent += message.decode(message.tensor)
        # What was sent on average tends to x, one rounding for all messages together.
        assert (sent / step - x).abs().max() <= 1.02 / 127 / step


def test_tags_tell_rounds_attempts_and_fragments_apart_and_leave_room_for_kinds() -> None:
    tags = {tag_of(clock, attempt, f) for clock in (0, 1, 16383) for attempt in (0, 1, 255) for f in (0, 1, 63)}
    assert len(tags) == 27
    assert all(tag % KINDS == 0 for tag in tags)
    assert max(tags) + KINDS <= UNUSED_TAG < 2**31
    assert max(Tag) < KINDS
