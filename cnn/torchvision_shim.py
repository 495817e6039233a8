"""torchvision, usable beside a CPU-only torch too: `from cnn.torchvision_shim import torchvision`.

torchvision's wheels are built for CUDA. Beside a CPU-only torch its compiled operators do not load, and then
`import torchvision` fails because it describes two of them to the compiler (`operator torchvision::nms does not
exist`). Declaring their schemas is enough for models, transforms and data sets; the operators themselves
(detection, `torchvision.io.decode_jpeg`) stay unavailable. Where the import works as it is, nothing is declared.

The import takes a second or two: import this module only where torchvision is needed.
"""

import torch

# Both operators that torchvision describes without asking whether they are there.
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
