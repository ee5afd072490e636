"""Farspark: vLLM's DSpark speculative drafter, run on another machine.

Importing this package loads neither torch nor vLLM: the probe and the command line must start on hosts that have neither.
"""

__version__ = "0.1.0"
