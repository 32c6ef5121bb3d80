"""Decorators for tests that run on several accelerators."""
