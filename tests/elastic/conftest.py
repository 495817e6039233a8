"""Both ways in which members connect."""

import pytest
import torch

from common.torch_internals import can_reconfigure

RECONFIGURES = pytest.mark.skipif(
    not can_reconfigure(torch.device("cpu")),
    reason=f"torch {torch.__version__} cannot reconfigure process groups, 2.14 can",
)


@pytest.fixture(params=["new", pytest.param("reconfigured", marks=RECONFIGURES)])
def groups(request: pytest.FixtureRequest) -> str:
    """A value of elastic.groups."""
    return request.param
