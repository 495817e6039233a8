"""Data-parallel training over process groups: gossip (decentralized) and the all-reduce baseline.

    model = DecentralizedDataParallel(model, topology="one_peer_exponential")
    optimizer = AccumAdamW(model.parameters(), lr=6e-4)
    model.attach(optimizer)            # merge before the step, launch after it

Glossary for the whole project:

worker    node of a topology: one replica of the model, trained by one rank or by `ranks_per_worker` ranks
rank      process of the process group; world size of a group: its number of ranks
host      machine; holds `workers_per_host` workers
round     one gossip step, x_i <- sum_j W_ij x_j with mixing matrix W; a topology is a schedule of rounds
clock     number of committed updates; round `clock` of the schedule comes next, with local steps round clock / H
vector    all parameters of one dtype and device in one flat tensor; they are views of it (`common.flat`)
bucket    slice of a vector, the unit that is sent, mixed and updated
exchange  what one rank sends and receives for one bucket in one round; its transport is SEND_RECV, SUBGROUP (an
          all-reduce in a group) or HIERARCHICAL (average inside the host, exchange shards between hosts, gather inside)
local step an update without a round; with `local_steps` there is a round every H updates
anchor    what such a round mixes: the outer parameters, from which a worker's displacement in the round is measured
fragment  run of buckets with its own rounds, so that the messages of a round are spread over H updates
shard     part of each parameter that a rank holds if the ranks of a worker split one replica among them (FSDP2);
          also the part of a bucket that one worker of a host exchanges with other hosts
rail      the workers with the same index in their hosts; they exchange the same shard of a bucket
launch    post an exchange's messages; merge: wait for them and mix; drain: wait for them and discard them
"""

from common.options import Mixing, Outer
from common.parallel.allreduce import AllReduceDataParallel
from common.parallel.counters import CommunicationCounters
from common.parallel.data_parallel import DataParallel
from common.parallel.decentralized import DecentralizedDataParallel
from common.parallel.grad_scaler import GradScaler

__all__ = [
    "AllReduceDataParallel",
    "CommunicationCounters",
    "DataParallel",
    "DecentralizedDataParallel",
    "GradScaler",
    "Mixing",
    "Outer",
]
