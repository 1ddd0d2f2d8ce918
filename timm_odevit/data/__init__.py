"""Images and labels in batches.

preprocessing       how a model expects its images
folders             image files, through timm.data
arrays              small images in memory
mixup               timm's mixup on top of either
"""
