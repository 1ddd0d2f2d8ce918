"""Speed and memory; figures that are compared are measured side by side in one run.

timing              calls that take turns, and the peak of what a call allocates
products            the matrix products and the attention of a forward pass alone
candidates          what is compared: models at several step counts, merged, compiled; training steps
files               what a model takes on disk, and how long it takes to load
tables              what was measured: rows, tables, JSON
measure             benchmark and benchmark_training
"""
