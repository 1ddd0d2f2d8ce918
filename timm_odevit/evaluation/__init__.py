"""How well and how fast a model does.

accuracy            evaluate: accuracy, agreement and speed at several step counts
halting             calibrate_halting: when an image may stop before the last step
results             the results as a table, JSON, a data frame, a plot, and in a notebook
"""
