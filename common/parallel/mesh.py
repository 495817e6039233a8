"""A DeviceMesh with named dimensions in place of `ranks_per_worker`."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.parallel.sharded import is_sharded

REPLICATE, SHARD = "replicate", "shard"


def ranks_per_worker_of(mesh: DeviceMesh, module: nn.Module, given: int | None) -> int:
    """Return how many ranks share a replica: the size of the mesh's dimension "shard", 1 without it.

    Raises ValueError if ranks_per_worker was `given` too, for other dimensions than ("replicate",) and ("replicate",
    "shard"), for a mesh that is not all ranks in their order, and for shards of which the module has none.
    """
    if given is not None:
        raise ValueError(f"ranks_per_worker={given} with a mesh: expected one of the two")
    names = mesh.mesh_dim_names
    if names not in ((REPLICATE,), (REPLICATE, SHARD)):
        raise ValueError(
            f"mesh with dimensions {names}: expected ('{REPLICATE}',) or ('{REPLICATE}', '{SHARD}'): gossip runs along "
            "the first, fully_shard along the second, and nothing along others such as tensor parallelism"
        )
    ranks, world_size = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if ranks != list(range(world_size)):
        raise ValueError(f"mesh over ranks {ranks}: expected all {world_size} ranks in order, as of init_device_mesh")
    shards = mesh[SHARD].size() if SHARD in names else 1
    if shards > 1 and not is_sharded(module):
        raise ValueError(
            f"mesh with {SHARD}={shards}, but no parameter of the module is sharded: expected "
            f"fully_shard(module, mesh=mesh['{SHARD}']) first, or ranks_per_worker={shards} for whole replicas"
        )
    return shards
