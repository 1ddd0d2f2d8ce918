"""From a pretrained transformer to an ODE-ViT, in place, and back.

families            where a timm model's blocks are, and which field takes them
convertible         what is refused, and why
measure             what is measured on images before a conversion
alignment           heads and neurons of several layers in one order
initialisation      the shared blocks' weights
conversion          convert_ and its way back
merge               merge_, for deployment, and its way back
replacements        attributes that are replaced and put back together
sizing              choose_size
torchscript         what torch.jit.script needs
torchvision         from_torchvision
"""
