"""Image classification: ResNets and torchvision's networks on digits, CIFAR-10 and ImageNet."""
