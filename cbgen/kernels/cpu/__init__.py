"""Kernels in C for CPUs, and what calls them."""
