"""Small runs."""

SMALL = ["experiment=quickstart", "model.width=2", "training.checkpoint_every=20", "logging.every=5"]
# A run that takes long enough to be interrupted in the middle.
RUN = [*SMALL, "training.steps=300", "topology=aer", "seed=3"]
MIDDLE = 30
