"""The native helper of asynchronous rounds: words in host memory between a device stream and a CPU thread, and a watchdog.

`hostflag.h` is the contract, `build` compiles it, `loader` finds a build or makes one, `page` gives its calls types. Standard
library only; no CUDA anywhere: who has a stream registers the memory with its driver.
"""

from farspark.native.build import NativeUnavailable
from farspark.native.loader import HostflagLibrary, load
from farspark.native.page import HostflagError, HostPage, How, Reply, Status

__all__ = ["HostPage", "HostflagError", "HostflagLibrary", "How", "NativeUnavailable", "Reply", "Status", "load"]
