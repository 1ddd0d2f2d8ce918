"""shrink: from a model and images to a small model, with a verdict on whether it is worth it.

images              what images there are, to learn from and to judge by, and what is measured on them
search              the smallest size that keeps a share of the model, by trying some
learning            minutes of training, of which the best state is kept
plain               plain students of equal size: some of the model's own blocks
candidates          what is compared, as files that run without this package
verdict             the table, and what it recommends
page                the same as a page, with plots
run                 shrink: all of it, in a folder
"""
