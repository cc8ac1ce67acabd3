"""Training: the trainer, its configuration, checkpoints, and one training per folder."""
