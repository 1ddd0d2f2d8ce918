"""How well and how fast a model does.

results             timed passes of data sets through models, and their results as a table, JSON, a plot, in a notebook
accuracy            evaluate: accuracy and agreement at several step counts; calibrate_halting: when an image may stop
embeddings          evaluate_embeddings: how near the teacher's; neighbours, k-NN, a linear classifier
"""
