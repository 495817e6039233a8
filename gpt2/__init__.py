"""GPT-2 language models on OpenWebText, and on the Python standard library's sources."""
