"""How well and how fast a model does.

accuracy            evaluate: accuracy, agreement and speed at several step counts; the timed passes of all evaluations
embeddings          evaluate_embeddings, patch_agreement: how near the teacher's; neighbours, k-NN, a linear classifier
halting             calibrate_halting: when an image may stop before the last step
results             the results as a table, JSON, a plot, and in a notebook
"""
