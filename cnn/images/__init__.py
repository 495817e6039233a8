"""Images in files: ImageNet, or any folder of images by class, read by FFCV or by torchvision."""
