"""A DSpark drafter for SmolLM2-135M-Instruct, as a folder that vLLM and Farspark's worker load."""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The folder with config.json and model.safetensors."""
    return Path(__file__).parent / "checkpoint"
