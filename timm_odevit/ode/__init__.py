"""The mathematics, independent of timm's models: a vector field, a solver, and OdeBlocks, which holds both."""
