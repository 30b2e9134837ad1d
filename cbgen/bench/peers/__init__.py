"""The engines of a benchmark, each a script that runs in the Python environment that has the engine."""
