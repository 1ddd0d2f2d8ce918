"""Images and labels in batches: `read_data` makes a `Data` of whatever there is.

preprocessing       opens image files; how a model expects its images and labels
batches             settings of the data; loaders of images in memory, of image files, and of other loaders
sources             folders, which files belong to which part and class; .npz files; what is held out
read                the one door to all of them
"""
