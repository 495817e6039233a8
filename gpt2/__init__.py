"""Language modelling with GPT-2, on OpenWebText and on the sources of Python's standard library."""
