"""shrink: from a model and images to a small model, with a verdict on whether it is worth it.

images              what images there are, to learn from and to judge by, and what is measured on them
learning            minutes of training, of which the best state is kept; the smallest size that keeps a share
candidates          what is compared, as files that run without this package; plain students of equal size
verdict             the table, and what it recommends
page                the same as a page, with plots
run                 shrink: all of it, in a folder
"""
