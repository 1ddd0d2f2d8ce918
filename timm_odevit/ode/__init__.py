"""The mathematics, independent of timm's models: a vector field, a solver, and OdeBlocks, which holds both.

Read first: blocks, solver, methods, fields.

fields              what is integrated: the sub-layers of a transformer block, and the paper's block
time_dependence     fields whose weights depend on t; shallow copies of modules with other weights
savings             what steps need not compute: similar tokens are merged, images that are done leave (HALTING by name)
methods             the integration methods: a class of steps for each, METHODS by name
config              OdeConfig: every setting of an ODE-ViT; FIELDS by name
solver              the steps that a configuration asks for, adaptive ones too; the solver for any field
blocks              OdeBlocks, the sequence of steps that replaces a model's blocks; views with other steps
"""
