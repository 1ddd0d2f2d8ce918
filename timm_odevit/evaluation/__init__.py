"""How well a model does."""
