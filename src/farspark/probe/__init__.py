"""Questions to a worker from outside of an engine: standard library only, so that they can be asked by a bare python3."""
