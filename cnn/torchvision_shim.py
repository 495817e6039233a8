"""torchvision that also imports with a CPU-only torch: `from cnn.torchvision_shim import torchvision`.

torchvision's wheels are built for CUDA. With a CPU-only torch their compiled operators do not load, and
`import torchvision` fails because it registers fake kernels for two of them (`operator torchvision::nms does not
exist`). Declaring the schemas of these two is enough for models, transforms and data sets; the operators themselves
(detection, `torchvision.io.decode_jpeg`) stay unavailable. If the plain import works, nothing is declared.

The import takes a second or two, so import this module only where torchvision is needed.
"""

import torch
from torch import nn

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

# Auxiliary classifiers would change what the model returns in training, so they are switched off.
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def architectures() -> list[str]:
    """Return the names that `build_torchvision_model` takes."""
    return torchvision.models.list_models(module=torchvision.models)


def build_torchvision_model(architecture: str, classes: int) -> nn.Module:
    """Build a network that maps [B, 3, H, W] to logits [B, classes]. Raises ValueError for an unknown name."""
    options = {"aux_logits": False, "init_weights": True} if architecture in WITH_AUXILIARY_HEADS else {}
    return torchvision.models.get_model(architecture, weights=None, num_classes=classes, **options)
