"""Continuous batching: requests, scheduler, input layout, sampler and the manager that steps them."""
