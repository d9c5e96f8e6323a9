"""Hydra YAML: choices and numbers, never structure."""
