"""Models in files and on the Hugging Face Hub."""
