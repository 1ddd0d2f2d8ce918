"""How well and how fast a model does."""
