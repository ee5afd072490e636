"""The Triton backend named ``cpu``: present and active, so that vLLM keeps Triton, but without a compiler.

Triton imports ``compiler`` and ``driver`` from here and takes the one concrete class that each of them has. Kernels run
under Triton's interpreter, which never asks a backend to compile.
"""
