"""From raw parallel text to fairseq's binarized format."""
