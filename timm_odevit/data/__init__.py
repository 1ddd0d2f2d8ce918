"""Images and labels in batches.

preprocessing       how a model wants its images
folders             image files, through timm.data
arrays              small images in memory
mixup               timm's mixup over any of them
"""
