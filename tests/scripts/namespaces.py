"""Where tests can emulate hosts: with the privileges of root and iproute2. Where they are there, hosts must come up."""

import shutil
from pathlib import Path

import pytest

SYS_ADMIN, NET_ADMIN = 21, 12  # bits of CapEff


def privileged() -> bool:
    """Whether this process may make and configure network namespaces; root of a container often may not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    capabilities = int(next(line.split()[1] for line in lines if line.startswith("CapEff")), 16)
    return all(capabilities >> bit & 1 for bit in (SYS_ADMIN, NET_ADMIN))


needs_namespaces = pytest.mark.skipif(
    not privileged() or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)
