"""The mathematics, independent of timm's models: a vector field, a solver, and OdeBlocks, which holds both.

Read first: blocks, solver, methods, fields.

fields              what is integrated: the sub-layers of a transformer block, and the paper's block
tokens              fewer tokens along t: similar ones are merged
methods             the integration methods: a class of steps for each, METHODS by name
halting             fewer steps: images whose answer is settled leave the batch; HALTING by name
views               shallow copies of modules in which others are replaced
config              OdeConfig: every setting of an ODE-ViT; FIELDS by name
solver              where the K steps lie, along the spans of several blocks (layout); adaptive methods
blocks              OdeBlocks, the sequence of steps that replaces a model's blocks; views with other steps
"""
