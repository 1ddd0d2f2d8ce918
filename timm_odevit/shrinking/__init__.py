"""shrink: from a model and images to a small model, with a verdict on whether it is worth it.

judge               images to learn from and to judge by, what is measured on them, and the size that suits them
candidates          what is compared, as files that run without this package; plain students of equal size
verdict             the table, what it recommends, and both as a page
run                 shrink: all of it, in a folder
"""
