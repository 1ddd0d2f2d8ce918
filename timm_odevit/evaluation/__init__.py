"""How well and how fast a model does.

accuracy            evaluate: accuracy, agreement and speed at several step counts
plots               plots of the results
"""
