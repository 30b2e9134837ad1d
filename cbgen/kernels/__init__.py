"""Attention over pages, one signature for every backend."""
