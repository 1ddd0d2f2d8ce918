"""From a pretrained transformer to an ODE-ViT, in place, and back."""
