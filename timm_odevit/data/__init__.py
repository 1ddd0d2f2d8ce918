"""Images and labels in batches: `read_data` makes a `Data` of whatever there is.

config              settings of the data
preprocessing       how a model expects its images and labels
batches             loaders of loaders: mixed, labelled by a model, told of an epoch
arrays              images in memory, augmented on the device
folders             image files
read                the one door to all of them
"""
