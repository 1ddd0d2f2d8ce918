"""Models in files that run without this package."""
