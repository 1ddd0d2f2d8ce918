"""Doors of before, until nobody uses them."""
from .preprocessing import class_names, model_name, open_image, read_image
from .read import Pictures, pictures

__all__ = ['Pictures', 'class_names', 'model_name', 'open_image', 'read_image', 'some_images']
some_images = pictures
