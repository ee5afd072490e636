"""A virtual machine with an RDMA device made of software, for tests on machines that have none.

Debian's kernel under QEMU, with this machine's own files as its root, read-only; what it writes goes to memory, and to one
folder that comes back. Inside, `inside.sh` makes two cards on one wire into Soft-RoCE devices and runs a command. Emulated, so
it is for correctness and faults, never for timing.

    python -m tests.rdma.machine [--seconds N] [--] COMMAND ...
"""

from __future__ import annotations

import argparse
import compileall
import io
import lzma
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "rdma"
PACKAGE = "linux-image-amd64"

# Loaded by the first program of the machine, to reach its root; the rest comes from there.
BOOT_MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay")
MEMORY_MIB = 3072
PROGRAMS = ("qemu-system-x86_64", "busybox", "depmod", "dpkg-deb", "apt-get", "rdma", "ip")
COMPILED = ("src", "tests/rdma", "tests/transport", "tests/sim", "tests/fakes")
REMEDY = "apt-get install qemu-system-x86 busybox-static kmod iproute2 rdma-core ibverbs-providers libucx-dev ucx-utils"


class NoMachine(Exception):
    """It cannot be built or run here; the message says why, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=600, help="the machine is stopped after so long (default %(default)s)"
    )
    parser.add_argument("command", nargs="+", help="run inside, in the root of this repository")
    options = parser.parse_args()
    try:
        return run(options.command, options.seconds)
    except NoMachine as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(command: list[str], seconds: float) -> int:
    """Boot, run `command`, print what it prints, and return its exit code. Raises NoMachine."""
    kernel, initramfs = build()
    for folder in COMPILED:
        # Here and not inside, where it takes twenty times as long and is lost.
        compileall.compile_dir(ROOT / folder, quiet=2)
    with tempfile.TemporaryDirectory(prefix="farspark-rdma-") as results:
        Path(results, "command").write_text(
            f"cd {shlex.quote(str(ROOT))} && export PATH={shlex.quote(os.environ['PATH'])} && {shlex.join(command)}\n"
        )
        began_s = time.monotonic()
        try:
            subprocess.run(_qemu(kernel, initramfs, results), stdin=subprocess.DEVNULL, timeout=seconds, check=True)
        except subprocess.TimeoutExpired:
            raise NoMachine(f"the machine was stopped after {seconds:g} s") from None
        except subprocess.CalledProcessError as error:
            raise NoMachine(f"QEMU ended with exit code {error.returncode}") from error
        print(f"machine: {time.monotonic() - began_s:.0f} s, boot included", file=sys.stderr)
        code = Path(results, "code")
        if not code.exists():
            raise NoMachine("the command did not come to its end; the kernel's messages are above")
        return int(code.read_text())


def _qemu(kernel: Path, initramfs: Path, results: str) -> list[str]:
    # Emulation everywhere: with KVM a machine inside of another one may hang, and would run tests that pass nowhere else.
    return [
        *(
            "qemu-system-x86_64",
            "-machine",
            "pc",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            str(MEMORY_MIB),
        ),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *(
            "-append",
            f"console=ttyS0 quiet panic=-1 no_timer_check farspark={HERE / 'inside.sh'} modules={BUILD / 'kernel'}",
        ),
        # Two cards on one wire that leads nowhere else.
        *("-netdev", "hubport,hubid=0,id=n0", "-device", "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01"),
        *("-netdev", "hubport,hubid=0,id=n1", "-device", "virtio-net-pci,netdev=n1,mac=52:54:00:00:00:02"),
        *(
            "-fsdev",
            "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device",
            "virtio-9p-pci,fsdev=root,mount_tag=root",
        ),
        *(
            "-fsdev",
            f"local,id=out,path={results},security_model=none,multidevs=remap",
            "-device",
            "virtio-9p-pci,fsdev=out,mount_tag=out",
        ),
    ]


def build() -> tuple[Path, Path]:
    """Kernel and initramfs, from what was built before where it is there."""
    missing = [
        program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if missing:
        raise NoMachine(f"not installed: {', '.join(missing)}; {REMEDY}")
    if os.geteuid() != 0:
        raise NoMachine("the machine reads this one's files as its own: run it as root")
    kernel, initramfs = BUILD / "vmlinux", BUILD / "initramfs"
    modules = BUILD / "kernel"
    if not (modules / "lib").is_dir():
        _unpack_kernel(modules)
    if not kernel.exists():
        (compressed,) = (modules / "boot").glob("vmlinuz-*")
        _write(kernel, uncompressed(compressed.read_bytes()))
    sources = [Path(__file__).stat().st_mtime, (HERE / "boot.sh").stat().st_mtime]
    if not initramfs.exists() or initramfs.stat().st_mtime < max(sources):
        _write(initramfs, _initramfs(modules))
    return kernel, initramfs


def _unpack_kernel(into: Path) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    depends = _output("apt-cache", "depends", PACKAGE)
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if len(names) != 1:
        raise NoMachine(f"apt knows no kernel {PACKAGE}; run apt-get update")
    with tempfile.TemporaryDirectory(prefix="kernel-", dir=BUILD) as directory:
        # apt's own user may not write here, and says so; the download works all the same.
        subprocess.run(["apt-get", "download", "-q", names[0]], cwd=directory, check=True, stderr=subprocess.DEVNULL)
        (package,) = Path(directory).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), f"{directory}/out"], check=True)
        (version,) = Path(directory, "out", "lib", "modules").iterdir()
        subprocess.run(["depmod", "-b", f"{directory}/out", version.name], check=True)
        Path(directory, "out").rename(into)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def uncompressed(image: bytes) -> bytes:
    """The ELF file inside a bzImage: it boots twice as fast as one that must unpack itself under emulation."""
    for magic, unpack in ((b"\xfd7zXZ\x00", _unxz), (b"\x1f\x8b\x08", _gunzip)):
        at = image.find(magic)
        while at >= 0:
            inside = unpack(image[at:])
            if inside.startswith(b"\x7fELF"):
                return inside
            at = image.find(magic, at + 1)
    raise NoMachine("the kernel is packed in a way that is not known here")


def _unxz(data: bytes) -> bytes:
    try:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data)
    except lzma.LZMAError:
        return b""


def _gunzip(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data)
    except zlib.error:
        return b""


def _initramfs(kernel: Path) -> bytes:
    (modules,) = (kernel / "lib" / "modules").iterdir()
    order = _in_order(modules, BOOT_MODULES)
    archive = io.BytesIO()
    numbers = iter(range(1, 10_000))
    for folder in ("bin", "dev", "proc", "sys", "lower", "upper", "new", "modules"):
        _add(archive, next(numbers), folder, b"", stat.S_IFDIR | 0o755)
    busybox = shutil.which("busybox")
    assert busybox is not None
    _add(archive, next(numbers), "bin/busybox", Path(busybox).read_bytes(), stat.S_IFREG | 0o755)
    _add(archive, next(numbers), "init", (HERE / "boot.sh").read_bytes(), stat.S_IFREG | 0o755)
    for at, path in enumerate(order):
        _add(archive, next(numbers), f"modules/{at:02}.ko", path.read_bytes(), stat.S_IFREG | 0o644)
    _add(archive, 0, "TRAILER!!!", b"", 0)
    return archive.getvalue()


def _in_order(modules: Path, wanted: tuple[str, ...]) -> list[Path]:
    """The files of `wanted` and of all they need, each after what it needs."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[Path(path).name.split(".")[0].replace("-", "_")] = [path, *rest.split()]
    builtin = {
        Path(line).name.split(".")[0].replace("-", "_") for line in (modules / "modules.builtin").read_text().split()
    }
    order: list[Path] = []
    for name in wanted:
        if name in builtin:
            continue
        # modules.dep lists what a module needs, the innermost last.
        for path in reversed(needs[name]):
            if modules / path not in order:
                order.append(modules / path)
    return order


def _add(archive: io.BytesIO, number: int, name: str, data: bytes, mode: int) -> None:
    """One file of a cpio archive, in the format that the kernel reads (newc)."""
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    archive.write(b"070701" + b"".join(b"%08x" % field for field in fields) + encoded)
    archive.write(b"\0" * (-archive.tell() % 4))
    archive.write(data)
    archive.write(b"\0" * (-archive.tell() % 4))


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
