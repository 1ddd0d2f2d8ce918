"""Models in files that run without this package.

formats             what each format needs, and how it is written
export              export_model: checks, merges and writes a copy of a model
"""
