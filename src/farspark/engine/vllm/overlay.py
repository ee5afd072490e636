"""The overlay: vLLM's own `spec_decode/__init__.py` plus one guarded branch, for images that take no plugin.

It is made from the exact file of one image and says which; `difference` takes the branch out again and compares what is left
with that file. Works on bytes and imports nothing of vLLM.
"""

from __future__ import annotations

import ast
import hashlib
import re
from typing import Final

from farspark.errors import ConfigError

# The file, inside the folder that holds the package `vllm`.
OVERLAID: Final = "vllm/v1/worker/gpu/spec_decode/__init__.py"

_FUNCTION: Final = "init_speculator"
_PARAMETERS: Final = (["vllm_config", "device"], ["vllm_config", "device", "req_states"])
# What stands before the choice of a speculator; the branch relies on the local name.
_PREAMBLE: Final = ("speculative_config = vllm_config.speculative_config", "assert speculative_config is not None")

_RECORD: Final = b"# farspark overlay of the file with SHA-256 "
_RECORD_LINE: Final = re.compile(re.escape(_RECORD) + rb"([0-9a-f]{64})\n")
# `environ` under a name of its own: an import makes a name local to the whole function, also where the file uses it.
BRANCH: Final = b"""\
    # farspark: begin
    if speculative_config.method == "dspark":
        from os import environ as farspark_environ

        if farspark_environ.get("VLLM_DSPARK_REMOTE", "").strip():
            from farspark.engine.vllm.plugin import speculator_for_overlay

            return speculator_for_overlay(vllm_config, device)
    # farspark: end
"""


def make_overlay(base: bytes) -> bytes:
    """`base` with the record line and the branch. Raises ConfigError if `base` is not the file that is expected."""
    lines = base.splitlines(keepends=True)
    place = _place_of_branch(base) - 1
    record = _RECORD + hashlib.sha256(base).hexdigest().encode() + b"\n"
    return b"".join([record, *lines[:place], BRANCH, *lines[place:]])


def difference(overlay: bytes, base: bytes) -> str | None:
    """Why `overlay` is not `base` plus the branch and nothing else, as a sentence; None if it is.

    Raises ConfigError if `base` is not the file that is expected.
    """
    record = _RECORD_LINE.match(overlay)
    if record is None:
        return "it has no record of its base in the first line; it was not written by `farspark overlay generate`"
    expected, recorded = hashlib.sha256(base).hexdigest(), record[1].decode()
    if recorded != expected:
        return f"it was made from the file with SHA-256 {recorded}, the base has {expected}; generate it for this image"
    body = overlay[record.end() :]
    if (count := body.count(BRANCH)) != 1:
        return f"it has the branch of this Farspark {count} times, expected once; generate it again"
    before, _, after = body.partition(BRANCH)
    if before + after != base:
        return f"without the branch it differs from the base in line {_first_difference(before + after, base)}"
    if overlay != make_overlay(base):
        return "the branch does not stand before the choice of a speculator; generate it again"
    return None


def _place_of_branch(base: bytes) -> int:
    """The line, counted from 1, of the statement that chooses a speculator. Raises ConfigError saying what is not as
    expected."""
    if base.startswith(b"\xef\xbb\xbf") or b"\r" in base:
        raise _unexpected("it has a byte order mark or carriage returns, which vLLM's file has not")
    if _RECORD in base or BRANCH in base:
        raise _unexpected("it is an overlay already; give the image's own file")
    try:
        tree = ast.parse(base.decode("utf-8"))
    except (ValueError, SyntaxError) as error:
        raise _unexpected(f"it is not Python ({error})") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION]
    if len(functions) != 1:
        raise _unexpected(f"it defines {_FUNCTION} {len(functions)} times, expected once")
    (function,) = functions
    if (found := ast.unparse(_bare(function.args))) not in [", ".join(names) for names in _PARAMETERS]:
        raise _unexpected(
            f"{_FUNCTION} takes ({found}), expected ({', '.join(_PARAMETERS[0])}) with or without req_states"
        )
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if tuple(map(ast.unparse, body[: len(_PREAMBLE)])) != _PREAMBLE:
        raise _unexpected(f"{_FUNCTION} does not begin with `{'; '.join(_PREAMBLE)}`")
    choice = body[len(_PREAMBLE)] if len(body) > len(_PREAMBLE) else None
    if not isinstance(choice, ast.If) or "DSparkSpeculator(vllm_config, device)" not in ast.unparse(choice):
        raise _unexpected(f"{_FUNCTION} does not choose DSparkSpeculator(vllm_config, device) after that")
    if choice.col_offset != 4:
        raise _unexpected(f"{_FUNCTION} is indented by {choice.col_offset} columns, expected 4")
    return choice.lineno


def _bare(arguments: ast.arguments) -> ast.arguments:
    """The parameters without annotations."""
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return arguments


def _first_difference(left: bytes, right: bytes) -> int:
    """The number of the first line in which they differ, counted from 1."""
    ours, theirs = left.split(b"\n"), right.split(b"\n")
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    return same + 1


def _unexpected(reason: str) -> ConfigError:
    return ConfigError(f"this is not the {OVERLAID} that Farspark knows: {reason}")
