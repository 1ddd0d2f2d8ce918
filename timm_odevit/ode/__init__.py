"""The mathematics, independent of timm's models: a vector field, a solver, and OdeBlocks, which holds both.

Read first: blocks, solver, methods, fields.

config              OdeConfig: every setting of an ODE-ViT
fields              what is integrated: the sub-layers of a transformer block
lipschitz_field     the paper's block
time_dependence     fields whose weights depend on t
skeleton            shallow copies of modules, and how one runs with weights other than its own
methods             the integration methods: a class of steps for each, METHODS by name
adaptive            torchdiffeq's adaptive methods
solver              the sequence of steps that a configuration asks for
tokens              token merging: similar patch tokens are computed once
halting             images that leave the batch before the last step
integrate           the solver for any field
blocks              OdeBlocks, the sequence of steps that replaces a model's blocks
with_steps          a view of a model: another number of steps, the same weights
"""
