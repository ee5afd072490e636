"""The calls of CUDA's driver that the engine makes by itself, on addresses and on the handles of streams and kernels.

Nothing is opened at import. A process has one libcuda, so that a `CudaDriver` is no more than a view of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from farspark.errors import FarsparkError
from farspark.native import Launch

_POINTER, _SIZE, _UNSIGNED = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_U64, _U32 = ctypes.c_uint64, ctypes.c_uint32
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetCurrent": (_POINTER,),
    "cuFuncGetParamInfo": (_POINTER, _SIZE, _POINTER, _POINTER),
    "cuGetErrorString": (ctypes.c_int, _POINTER),
    "cuLaunchKernel": (_POINTER, *[_UNSIGNED] * 7, _POINTER, _POINTER, _POINTER),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, _UNSIGNED),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UNSIGNED),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _U64, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_U64, _POINTER, _SIZE, _POINTER),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuModuleLoadData": (_POINTER, _POINTER),
    "cuModuleUnload": (_POINTER,),
    "cuStreamBatchMemOp_v2": (_POINTER, _UNSIGNED, _POINTER, _UNSIGNED),
    "cuStreamQuery": (_POINTER,),
    "cuStreamWaitValue32_v2": (_POINTER, _U64, _U32, _UNSIGNED),
    "cuStreamWriteValue32_v2": (_POINTER, _U64, _U32, _UNSIGNED),
}
# What the engine does without where the driver is too old for it.
_NEW: Final = {"cuFuncGetParamInfo", "cuStreamBatchMemOp_v2"}
_INVALID_VALUE: Final = 1


class DriverError(FarsparkError):
    """The driver lacks a call, refuses it or does not do as told; the message has the call's name and the driver's words."""


class CudaDriver:
    """libcuda, which is in the process already where there is a device. Calls leave the GIL: the driver may make one wait for a
    module load.
    """

    def __init__(self) -> None:
        """Raises DriverError where there is no driver, or one without what every driver has that the engine is for."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver cannot be used: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, arguments in _CALLS.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, ctypes.c_int
                self._functions[name] = function
        for name in _CALLS.keys() - _NEW:
            self.function(name)

    def function(self, name: str) -> Callable[..., int]:
        """What it returns is the driver's result, 0 if all is well. Raises DriverError where this driver has no such call."""
        if name not in self._functions:
            raise DriverError(f"the CUDA driver has no {name}")
        function: Callable[..., int] = self._functions[name]
        return function

    def address(self, name: str) -> int:
        """Of a function. Raises DriverError."""
        return ctypes.cast(self.function(name), ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def check(self, name: str, result: int) -> None:
        """Raises DriverError where `result` is not 0."""
        if result:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](result, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")

    def call(self, name: str, *arguments: object) -> None:
        """Raises DriverError."""
        self.check(name, self.function(name)(*arguments))

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue it. Raises DriverError."""
        self.call("cuLaunchKernel", *launch.arguments(stream))

    def layout(self, function: int) -> list[tuple[int, int]]:
        """Offset and size in bytes of each parameter of a kernel, in order. Raises DriverError."""
        info, found = self.function("cuFuncGetParamInfo"), list[tuple[int, int]]()
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        # The driver does not say how many there are: it refuses the one behind the last.
        while (result := info(function, len(found), ctypes.byref(offset), ctypes.byref(size))) != _INVALID_VALUE:
            self.check("cuFuncGetParamInfo", result)
            found.append((offset.value, size.value))
        return found

    def device_address(self, address: int) -> int:
        """Where the device finds page-locked memory of the host's. Raises DriverError."""
        found = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), address, 0)
        return found.value
