"""A task whose fused update is not compiled."""
