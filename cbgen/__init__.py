"""cbgen: offline batch text generation on a continuous-batching engine of its own."""

__version__ = "0.1.0"
