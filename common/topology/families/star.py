"""Star around worker 0."""

from common.topology.round import Round


def schedule(n: int) -> tuple[Round, ...]:
    """Return the static star with Metropolis weights 1/n on every edge, hence doubly stochastic.

    Worker 0 averages everybody; each other worker keeps (n-1)/n of its value. lambda_2 = 1 - 1/n.
    """
    hub = dict.fromkeys(range(n), 1 / n)
    return (Round((hub, *({0: 1 / n, i: 1 - 1 / n} for i in range(1, n)))),)
