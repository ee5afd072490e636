"""The drafter process: sockets and sessions on one side of `batch.py`, torch on the other."""
