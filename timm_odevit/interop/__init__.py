"""Vision transformers of other libraries: turned into timm models, and put back."""
