"""The half of the backend that would compile kernels: it says which target it is for and refuses to compile."""

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class CpuBackend(BaseBackend):  # type: ignore[misc]
    """Stands for the CPU in Triton's list of backends; every request to compile is an error that says why."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "farspark-cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise _cannot_compile()

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> NoReturn:
        raise _cannot_compile()

    def load_dialects(self, context: object) -> None:
        """Nothing to load: the interpreter executes Python."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}


def _cannot_compile() -> RuntimeError:
    return RuntimeError(
        "the Triton backend 'cpu' of farspark-vllm-cpu-engine interprets kernels and compiles none: "
        "set TRITON_INTERPRET=1 before triton is imported"
    )
