"""Errors of lost peers are told from a program's own."""

import pytest

from common.parallel.collectives import PeerError, explained_if_lost


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
