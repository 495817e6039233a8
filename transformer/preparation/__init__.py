"""Preparation of parallel text: from raw lines to fairseq's binarized format."""
