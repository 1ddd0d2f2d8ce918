"""What the states do along the way, measured on the map that is deployed.

Each takes `model`: a timm model with one sequence of blocks (`discretisation_errors` an ODE-ViT), or a Flow, without
images; and, but for `spectral_norms`, `images` [B, C, H, W], normalised for the model, on its device, or a loader of
such batches. `batch_size` is how many are measured at a time. A measure raises TypeError for a model without a single
sequence of blocks, and ValueError for an adaptive method, or without images.
"""
