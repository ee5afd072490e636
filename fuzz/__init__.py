"""Any bytes at any moment: an event or a documented error, in bounded memory and bounded time.

A target is a function of one input, deterministic, without a thread, a socket or a wait. `python -m fuzz` drives them with a
coverage-guided engine; `python -m fuzz.TARGET FILE ...` runs one on the inputs given, with nothing but the project itself.
"""
