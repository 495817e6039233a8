"""N virtual workers in one process on one device: the oracle for distributed tests, and a cluster on a laptop."""

from common.simulate.batched import BatchedWorkers
from common.simulate.replica import SimulatedReplica, simulate

__all__ = ["BatchedWorkers", "SimulatedReplica", "simulate"]
