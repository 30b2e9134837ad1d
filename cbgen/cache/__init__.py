"""The paged KV cache: pool, allocators, sizing and storage. Nothing here imports the engine."""
