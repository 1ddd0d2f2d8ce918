"""Vision transformers of other libraries: turned into timm models, and put back.

from_libraries   from_torchvision, from_open_clip, from_transformers: a timm model of a model of theirs
put_tower        put_tower_: a timm model as the image tower of an open_clip or transformers model
"""
