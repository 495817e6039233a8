"""N virtual workers in one process on one device: the oracle of distributed tests, and a laptop's cluster."""

from common.simulate.batched import BatchedWorkers
from common.simulate.replica import SimulatedReplica, simulate

__all__ = ["BatchedWorkers", "SimulatedReplica", "simulate"]
