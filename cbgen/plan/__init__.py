"""`cbgen plan`: what a job comes to before it is run: tokens, limits, sharing, cache, disk, and how long it takes."""
