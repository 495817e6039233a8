"""torchvision's classification networks, untrained, with torchvision's initialisation."""

from torch import nn

# Auxiliary classifiers would change what the model returns in training, so they are switched off.
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def architectures() -> list[str]:
    """Return the names that `build_torchvision_model` takes."""
    from cnn.torchvision_shim import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def build_torchvision_model(architecture: str, classes: int) -> nn.Module:
    """Build a network that maps [B, 3, H, W] to logits [B, classes]. Raises ValueError for an unknown name."""
    from cnn.torchvision_shim import torchvision

    options = {"aux_logits": False, "init_weights": True} if architecture in WITH_AUXILIARY_HEADS else {}
    return torchvision.models.get_model(architecture, weights=None, num_classes=classes, **options)
