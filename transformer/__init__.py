"""Transformers that translate."""
