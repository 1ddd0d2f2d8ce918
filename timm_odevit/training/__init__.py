"""Teach a shared block to follow a pretrained model."""
