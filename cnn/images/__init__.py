"""Images in files: ImageNet and any folder of images by class, read by FFCV or by torchvision."""
