"""shrink: from a model and images to a small model, with a verdict on whether it is worth it.

material            a model, images to learn from and to judge by, what is measured on them, and students of the model
candidates          what is compared: another row of the verdict is another function in FORMS
verdict             the table, what it recommends, and both as a page
run                 shrink: all of it, in a folder
"""
