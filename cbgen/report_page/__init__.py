"""One HTML page that shows a job at a glance: what became of its rows, and how the engine spent the time."""
