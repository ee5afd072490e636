"""What imports vLLM's runner is collected only in a process that was started as an engine's is.

The imports replace parts of torch for good and want variables that are read once; ``test_in_an_engine_process`` starts
such a process.
"""

import os

IN_ENGINE_PROCESS = ["test_adaptive.py", "test_kernels.py", "test_linear.py", "test_norm.py"]

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else IN_ENGINE_PROCESS
