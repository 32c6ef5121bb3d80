"""Containers: wheels through cibuildwheel, and images with apex installed."""
