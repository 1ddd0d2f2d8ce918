"""Vision transformers of other libraries: turned into timm models, and put back.

build_vit        a timm model with another library's weights, compared with its model
torchvision      from_torchvision: a torchvision VisionTransformer
open_clip        from_open_clip: the image tower of an open_clip model
transformers     from_transformers: the image tower of a CLIP or SigLIP of transformers
put_tower        put_tower_: a timm model as the image tower of such a model
"""
