"""Training an embedder: augmentation, triplet mining and the recipe."""
