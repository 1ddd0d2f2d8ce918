"""What a model can do.

accuracy            evaluate: accuracy, agreement and speed over step counts
plots               figures of it
"""
