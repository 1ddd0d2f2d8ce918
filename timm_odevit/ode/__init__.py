"""The mathematics, independent of timm's models: a vector field, a solver, and OdeBlocks, which holds both.

config              OdeConfig, all settings
methods             the fixed-step methods as a table, and the names of the adaptive ones
fields, lipschitz   what is integrated: a transformer block's sub-layers, or the paper's block
time_dependence     fields whose weights depend on t
skeleton            how a module runs with weights other than its own
steps, adaptive     a step of each method; torchdiffeq's adaptive methods
integrate           the solver for any field
blocks              OdeBlocks, the sequence of steps that replaces a model's blocks
"""
