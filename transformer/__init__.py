"""Machine translation with the Transformer, on WMT14 and on names of numbers."""
