"""Programs on emulated hosts: python -m scripts.emulate, see program.py."""
