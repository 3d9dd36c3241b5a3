"""Fixtures of several files."""

from simulator import real_load_model, tiny, world  # noqa: F401
