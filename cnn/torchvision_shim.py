"""torchvision that also imports beside a CPU-only torch: `from cnn.torchvision_shim import torchvision`.

torchvision's wheels are built for CUDA. Beside a CPU-only torch their compiled operators do not load, and
`import torchvision` fails because it registers fake kernels for two of them (`operator torchvision::nms does not
exist`). Declaring the schemas of these two is enough for models, transforms and data sets; the operators themselves
(detection, `torchvision.io.decode_jpeg`) stay unavailable. If the plain import works, nothing is declared.

The import takes a second or two, so import this module only where torchvision is needed.
"""

import torch

# The operators for which torchvision registers fake kernels without checking that they exist.
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

declared: torch.library.Library | None = None  # the declarations live as long as this object

try:
    import torchvision
except RuntimeError as error:
    if "operator torchvision::" not in str(error):
        raise
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        declared.define(schema)
    import torchvision

__all__ = ["torchvision"]
