"""Errors of lost peers are told from a program's own; nothing is sent where there is nothing to send."""

import pytest
import torch
import torch.distributed as dist

from common.parallel.collectives import PeerError, broadcast_from_first, explained_if_lost
from tests.gpu.groups import delayed_group


@pytest.mark.parametrize(
    "message", ["[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "Application timeout caused pair closure"]
)
def test_what_gloo_says_of_lost_peers_becomes_a_peer_error(message: str) -> None:
    with pytest.raises(PeerError, match="rank 0: averaging gradients failed"), explained_if_lost("averaging gradients"):
        raise RuntimeError(message)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ") as caught, explained_if_lost("averaging gradients"):
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, PeerError)


def test_broadcasting_no_tensors_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise RuntimeError("No backend type associated with device type cpu")  # as NCCL says

    with delayed_group(2):
        monkeypatch.setattr(dist, "all_gather", called)
        broadcast_from_first([])
        with pytest.raises(RuntimeError, match="No backend"):
            broadcast_from_first([torch.zeros(2)])
