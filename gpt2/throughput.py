"""Model FLOPs utilisation: useful arithmetic as a share of the hardware's peak."""

import re

# Dense 16-bit tensor-core peak in TFLOP/s, from NVIDIA's data sheets; the first key in the device's name counts.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "V100": 125.0,
    "T4": 65.0,
}


def known_peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its name, or None if it is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def utilisation(tokens_per_s: float, flops_per_token: float, peak_tflops: float, devices: int) -> float:
    """Return the share of the devices' peak, 0 to 1, that forward and backward use, recomputation not counted."""
    return tokens_per_s * flops_per_token / (peak_tflops * 1e12 * devices)
