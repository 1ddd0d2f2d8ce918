"""shrink: from a model and images to a small model, with a verdict on whether it is worth it."""
