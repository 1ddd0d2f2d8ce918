"""Images and labels in batches: `read_data` makes a `Data` of whatever there is.

config              settings of the data
preprocessing       how a model expects its images and labels
batches             loaders of image files, and of other loaders: mixed, labelled by a model
arrays              images in memory, augmented on the device
folders             which files belong to which part and class
read                the one door to all of them
"""
