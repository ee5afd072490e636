"""Who touches the hidden-state buffer that a target keeps for classic MTP, and how: judged from sources, without vLLM.

DSpark never reads that buffer. Whether it may be taken away depends on whether everybody asks first if there is one.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping
from typing import Final

MTP_BUFFER: Final = "_mtp_hidden_buffer"
MTP_GETTER: Final = "get_mtp_target_hidden_states"


class BufferUse(enum.Enum):
    """What a function does with `MTP_BUFFER`, or with what `MTP_GETTER` hands out."""

    SETS = "sets"  # allocates it, or says that there is none
    ASKS = "asks for"  # looks first whether there is one
    RETURNS = "returns"  # hands it on as it is
    READS = "reads"  # takes it for granted


def buffer_uses(text: str) -> Iterator[tuple[str, BufferUse]]:
    """The qualified name of every function of a source that touches the buffer, and how it does."""
    if MTP_BUFFER in text or MTP_GETTER in text:
        for name, function in _functions(ast.parse(text), ()):
            use = _Function(function).use()
            if use is not None:
                yield name, use


def _functions(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; what is defined inside one belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield ".".join((*scope, child.name)), child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*scope, child.name))
        else:
            yield from _functions(child, scope)


class _Function:
    """One function, its nodes' parents, and the locals that stand for the buffer or its getter."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        self._nodes = list(ast.walk(function))
        self._parents: Mapping[ast.AST, ast.AST] = {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }
        self._aliases: frozenset[str] = frozenset()
        while (found := self._aliases | self._assigned()) != self._aliases:
            self._aliases = found

    def use(self) -> BufferUse | None:
        """None: nothing here touches it."""
        places = [node for node in self._nodes if self._is_it(node)]
        if not places:
            return None
        if any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in places):
            return BufferUse.SETS
        judged = {self._judge(node) for node in places}
        if judged == {BufferUse.RETURNS}:
            return BufferUse.RETURNS
        return BufferUse.READS if BufferUse.READS in judged else BufferUse.ASKS

    def _is_it(self, node: ast.AST) -> bool:
        """By attribute, by the string of a getattr or hasattr, or by a local that was given one of them."""
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=name):
                return name in (MTP_BUFFER, MTP_GETTER)
            case ast.Name(id=name, ctx=ast.Load()):
                return name in self._aliases
        return False

    def _assigned(self) -> frozenset[str]:
        """Locals that are given it whole: a slice of it is a use."""
        return frozenset(
            target.id
            for node in self._nodes
            if isinstance(node, ast.Assign) and self._is_whole(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        )

    def _is_whole(self, value: ast.expr) -> bool:
        match value:
            case ast.Call(func=ast.Name(id="getattr"), args=arguments):
                return any(map(self._is_it, arguments))
            case ast.Call(func=function):
                return self._is_it(function)
        return self._is_it(value)

    def _judge(self, node: ast.AST) -> BufferUse:
        match parent := self._parents[node]:
            case ast.Call(func=ast.Name(id="hasattr")):
                return BufferUse.ASKS
            case ast.Call(func=function) if function is node or ast.unparse(function) == "getattr":
                node, parent = parent, self._parents[parent]
        if isinstance(parent, ast.Return):
            return BufferUse.RETURNS
        if isinstance(parent, ast.Compare):
            return BufferUse.ASKS
        if isinstance(parent, ast.Assign) and parent.value is node:
            return BufferUse.ASKS  # what becomes of the local is judged where it is read
        return BufferUse.ASKS if self._is_behind_a_question(node) else BufferUse.READS

    def _is_behind_a_question(self, node: ast.AST) -> bool:
        """Inside an `if … is not None`, or after an `if … is None` that returns."""
        name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        inside = node
        while inside is not self._function:
            above = self._parents[inside]
            body = getattr(above, "body", None)
            if isinstance(body, list) and inside in body:
                if isinstance(above, ast.If) and f"{name} is not None" in ast.unparse(above.test):
                    return True
                if any(_returns_if_none(earlier, name) for earlier in body[: body.index(inside)]):
                    return True
            inside = above
        return False


def _returns_if_none(statement: ast.stmt, name: str) -> bool:
    return (
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == f"{name} is None"
        and isinstance(statement.body[-1], ast.Return)
    )
