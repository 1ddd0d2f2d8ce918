"""From a pretrained transformer to an ODE-ViT, in place, and back.

block_kinds         where a timm model's blocks are, and the field for each kind of block
initialisation      the shared blocks' weights, from the model's blocks
planning            what is refused and why; choose_size: the phases for a size
conversion          convert_, and restore() to undo it; attributes that are replaced and restored together
"""
