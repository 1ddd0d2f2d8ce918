"""Images and labels in batches.

preprocessing       how a model expects its images and labels; timm's mixup
folders             image files, through timm.data
arrays              small images in memory
pictures            image files one by one, and a few of either to look at
"""
