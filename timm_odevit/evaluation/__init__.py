"""How well and how fast a model does.

accuracy            evaluate: accuracy, agreement and speed over step counts
plots               plots of the results
"""
