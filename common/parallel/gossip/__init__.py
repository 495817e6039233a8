"""The gossip engine: the rounds of a topology over flat vectors of parameters, bucket by bucket.

`mixer.py` launches and merges rounds; `routes.py` resolves how this rank carries one out; the exchanges of a bucket are
in `point_to_point.py` and `hierarchical.py`; `network.py` posts them.
"""

from common.parallel.gossip.mixer import Mixer

__all__ = ["Mixer"]
