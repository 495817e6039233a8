"""The network interface of a host, as the kernel counts it."""

import os
from pathlib import Path


def bytes_sent_by_host() -> int | None:
    """Return the bytes, headers included, that the interface GLOO_SOCKET_IFNAME has sent; None where none is named."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, values = line.partition(":")
        if device.strip() == name:
            return int(values.split()[8])
    return None
