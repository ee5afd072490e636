"""Bytes to meaning and back: pure, standard library only, so that the probe runs on a bare python3."""
