"""How well and how fast a model does.

passes              the images of a loader through a model, timed, at one or several step counts
accuracy            evaluate: accuracy, agreement and speed at several step counts
embeddings          evaluate_embeddings, patch_agreement: how near the teacher's; neighbours, k-NN, a linear classifier
halting             calibrate_halting: when an image may stop before the last step
results             the results as a table, JSON, a data frame, a plot, and in a notebook
"""
