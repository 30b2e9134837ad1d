"""`cbgen bench`: the same requests through several engines, and what cbgen's own time goes into."""
