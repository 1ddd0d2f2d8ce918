"""Images and labels in batches: `read_data` makes a `Data` of whatever there is.

config              settings of the data
preprocessing       how a model expects its images and labels
batches             loaders of images in memory, of image files, and of other loaders
sources             folders, which files belong to which part and class; .npz files and tensors
read                the one door to all of them
"""
