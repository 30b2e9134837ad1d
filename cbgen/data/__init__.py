"""Rows in and out: readers, writers, the output schema and the manifest."""
