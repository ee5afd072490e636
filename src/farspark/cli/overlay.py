"""`farspark overlay`: vLLM's own file plus one branch, for images that take no plugin."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path, PurePosixPath

import farspark
from farspark.engine.vllm.overlay import OVERLAID, difference, make_overlay
from farspark.errors import ConfigError, FarsparkError

# Where the images of vLLM's own project have it.
_PACKAGES = PurePosixPath("/usr/local/lib/python3.12/dist-packages")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "overlay",
        help="write or verify the overlay for an image that takes no plugin",
        # Raw: the command is there to be copied.
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"An overlay is the image's own {OVERLAID}\nplus one branch, which is taken only where "
        "VLLM_DSPARK_REMOTE is set. Copy that file out of the image first:\n\n"
        f"  docker run --rm --entrypoint cat IMAGE {_PACKAGES / OVERLAID} > base.py",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    generate = actions.add_parser("generate", help="write the overlay and print Docker's mount options")
    generate.add_argument("base", metavar="IMAGE_FILE", type=Path, help="the image's own file, copied out of it")
    generate.add_argument("out", metavar="OUT", type=Path, help="the overlay to write")
    generate.add_argument(
        "--packages",
        metavar="DIR",
        type=PurePosixPath,
        default=_PACKAGES,
        help=f"the folder inside the image that holds the package vllm (default: {_PACKAGES})",
    )
    generate.set_defaults(run=run_generate)

    verify = actions.add_parser("verify", help="prove that a file is the image's file plus the branch and nothing else")
    verify.add_argument("overlay", metavar="FILE", type=Path, help="the overlay to verify")
    verify.add_argument(
        "--base", metavar="IMAGE_FILE", type=Path, required=True, help="the image's own file, copied out of it"
    )
    verify.set_defaults(run=run_verify)


def run_generate(options: argparse.Namespace) -> int:
    if not options.packages.is_absolute():
        raise ConfigError(f"--packages {options.packages}: expected an absolute path inside the image")
    base = _read(options.base)
    if options.out.exists() and options.out.samefile(options.base):
        raise ConfigError(f"{options.out} is the image's file itself, which is needed to verify; choose another OUT")
    overlay = _made_from(options.base, base)
    _write(options.out, overlay)
    _verify(options.out, _read(options.out), options.base, base)
    package = Path(farspark.__file__).resolve().parent
    print(f"wrote {options.out}: {options.base} plus one branch")
    print("mount both, in every container of the engine:")
    print(f"  -v {shlex.quote(f'{options.out.resolve()}:{options.packages / OVERLAID}:ro')}")
    print(f"  -v {shlex.quote(f'{package}:{options.packages / package.name}:ro')}")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    _verify(options.overlay, _read(options.overlay), options.base, _read(options.base))
    print(f"{options.overlay} is {options.base} plus the branch and nothing else")
    return 0


def _verify(path: Path, overlay: bytes, base_path: Path, base: bytes) -> None:
    _made_from(base_path, base)
    if (why := difference(overlay, base)) is not None:
        raise FarsparkError(f"{path} is not the overlay of {base_path}: {why}")


def _made_from(path: Path, base: bytes) -> bytes:
    try:
        return make_overlay(base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing: a container may have the old file mounted by name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        # The engine in the container may be another user.
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
