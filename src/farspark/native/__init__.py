"""The native helper of asynchronous rounds: words in host memory between a device stream and a CPU thread, and a watchdog.

`hostflag.h` is the contract, `build` compiles it, `loader` finds a build or makes one, `page` gives its calls types. Standard
library only; no CUDA anywhere: who has a stream registers the memory with its driver. Beside it, for the transports and for both
ends of a round: `ucx`, the UCX channel, and `round_calls`, a frame or a STEP in one call.
"""

from farspark.native.build import NativeUnavailable
from farspark.native.loader import HostflagLibrary, load
from farspark.native.page import Call, DeviceCalls, HostflagError, HostPage, How, Launch, Reply, Status, Submitter

__all__ = [
    "Call",
    "DeviceCalls",
    "HostPage",
    "HostflagError",
    "HostflagLibrary",
    "How",
    "Launch",
    "NativeUnavailable",
    "Reply",
    "Status",
    "Submitter",
    "load",
]
