"""From a pretrained transformer to an ODE-ViT, in place, and back.

families            where a timm model's blocks are, and the field for each
convertible         what is refused, and why
measure             what is measured on images before a conversion
alignment           one order for the heads and neurons of several layers
initialisation      the shared blocks' weights
conversion          convert_, and restore() to undo it
merge               merge_, for deployment, and restore() to undo it
replacements        attributes that are replaced together and restored together
sizing              choose_size
torchscript         what torch.jit.script needs
torchvision         from_torchvision
"""
