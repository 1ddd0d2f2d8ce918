"""From a pretrained transformer to an ODE-ViT, in place, and back.

block_kinds         where a timm model's blocks are, and the field for each kind of block
refusals            which models and settings are refused, and why
initialisation      the shared blocks' weights, from the model's blocks
svd_data            the moments of inputs, and one order of heads and neurons for several layers
conversion          convert_, and restore() to undo it
merge               merge_, for deployment, and restore() to undo it; attributes that are replaced and restored together
sizing              choose_size: the phases and the rank for a number of parameters
"""
