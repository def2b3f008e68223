"""Presets (YAML) and the typed description of every setting."""
