"""The shares of the ranks: no overlap, equal steps, the same global batches whatever the number of ranks."""

import numpy as np
import pytest

from cnn.images.augment import INDEX_MASK
from cnn.images.order import EpochOrder, make_tickets


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 8), (3, 4), (4, 5), (7, 2)])
def test_ranks_share_each_epoch_without_overlap_in_equal_steps(ranks: int, batch_size: int) -> None:
    orders = [EpochOrder(61, rank, ranks, batch_size, seed=3) for rank in range(ranks)]
    steps = 61 // (ranks * batch_size)
    epochs = []
    for epoch in range(2):
        tickets = [order.tickets(epoch) for order in orders]
        assert {len(share) for share in tickets} == {steps * batch_size}
        assert {order.steps for order in orders} == {steps}
        images = np.concatenate(tickets) & INDEX_MASK
        assert len(np.unique(images)) == len(images)
        assert images.max() < 61
        epochs.append(images)
    assert not np.array_equal(*epochs)


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    def global_batches(ranks: int) -> list[list[int]]:
        shares = [EpochOrder(64, rank, ranks, 16 // ranks, seed=5).tickets(2).reshape(4, -1) for rank in range(ranks)]
        return np.sort(np.concatenate(shares, axis=1), axis=1).tolist()

    assert global_batches(1) == global_batches(2) == global_batches(8)


def test_an_epoch_can_be_entered_anywhere() -> None:
    order = EpochOrder(100, 1, 3, 4, seed=0)
    for start in range(order.steps + 1):
        assert np.array_equal(order.tickets(7, start), order.tickets(7)[4 * start :])


def test_tickets_tell_epoch_and_image() -> None:
    assert make_tickets([0, 5], 0).tolist() == [0, 5]
    assert make_tickets([0, 5], 3).tolist() == [3 * 2**32, 3 * 2**32 + 5]


def test_fewer_images_than_a_global_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 x 8 images, but there are 15"):
        EpochOrder(15, 0, 2, 8, seed=0)
