"""What the states do along the way, measured on the map that is deployed; every measure also takes an ordinary ViT.

Every measure takes `model`: a timm model with one sequence of blocks, or a Flow, without images. And `images`
[B, C, H, W], normalised for the model, on its device, or a loader of such batches. `batch_size` is how many are
measured at a time. A measure raises TypeError for a model without a single sequence of blocks, and ValueError for an
adaptive method, or without images.
"""
