"""Finds the code that only a process on CUDA runs.

Code is *CUDA-only* by one of three rules, which look at the text alone:

1. It is reached under a condition on the type of the device that holds on CUDA: the body of `if`,
   what follows `if ...: return` with the opposite condition, a branch of `a if ... else b`, or what
   follows the condition in `... and b`. Such a condition compares something called `type`,
   `device`, or `device_type()` with "cuda" or "cpu", or is a name that the module gives one
   (`on_cuda = device.type == "cuda"`), or a parameter of that name.
2. It is a statement that uses `torch.cuda`, other than to ask whether there is a GPU.
3. It is a statement that pins memory.

Plans for GPUs are made on CPUs, so `compute_device` is no condition; neither is a dictionary by
device, which is data. What such code calls is not followed: a function without any of these marks
runs on a CPU as well.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("dlrm_sharded", "launch", "scripts")

DEVICES = {"type", "device", "device_type"}
"""Names of what is compared with "cuda" or "cpu"."""

ON_CUDA = "on_cuda"
"""Name of conditions that callers hand on."""

QUESTIONS = {"is_available", "is_initialized"}
"""Functions of `torch.cuda` that a CPU answers too."""

Place = tuple[int, int, int, int]
"""First line, its column, last line, its column."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A statement or an expression that only CUDA runs.

    Args:
        function: where it stands, with the names of classes.
        text: its first line.
    """

    path: str
    place: Place
    function: str
    text: str

    def __str__(self) -> str:
        line, column, *_ = self.place
        return f"{self.path}:{line}:{column} in {self.function}: {self.text}"


def all_pieces(root: Path) -> list[Piece]:
    """Return the pieces of all sources that users run."""
    paths = [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    return [piece for path in paths for piece in find_pieces(root, path)]


def find_pieces(root: Path, path: Path) -> list[Piece]:
    """Return the CUDA-only pieces of a file below the root, in order."""
    source = path.read_text()
    finder = _Finder(ast.parse(source))
    name = str(path.relative_to(root))
    pieces = {
        Piece(name, _place(node), function, ast.unparse(node).splitlines()[0])
        for function, node in finder.found
    }
    return sorted(pieces)


def _place(node: ast.AST) -> Place:
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


class _Finder:
    """Walks a module; `found` has the function and the node of each piece."""

    def __init__(self, module: ast.Module) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self._conditions = {ON_CUDA, *_given_conditions(module)}
        self._walk(module, "module")

    def _walk(self, node: ast.AST, function: str) -> None:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, function, only=self._is_only(node, name))
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.expr):
                        self._expression(child, function)
                    elif isinstance(child, ast.AST):
                        self._walk(child, function)

    def _is_only(self, node: ast.AST, name: str) -> bool:
        """Return whether a block is a branch that only CUDA takes."""
        if not isinstance(node, ast.If):
            return False
        wanted = {"body": True, "orelse": False}
        return self._sign(node.test) == wanted[name]

    def _block(self, statements: Sequence[ast.stmt], function: str, *, only: bool) -> None:
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                inner = statement.name if function == "module" else f"{function}.{statement.name}"
                self._walk(statement, inner)
                continue
            is_simple = not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try)
            if is_simple and (only or _uses_cuda(statement)):
                self.found.append((function, statement))
            elif not is_simple and only:
                self._inside(statement, function)
            elif not is_simple:
                for part in _heads(statement):
                    if _uses_cuda(part):
                        self.found.append((function, part))
            self._walk(statement, function)
            if isinstance(statement, ast.If) and self._sign(statement.test) is False:
                only = only or _leaves(statement.body)

    def _inside(self, statement: ast.stmt, function: str) -> None:
        """Take the heads and blocks of a statement that only CUDA runs."""
        self.found += [(function, part) for part in _heads(statement)]
        for value in (getattr(statement, name, None) for name in ("body", "orelse", "finalbody")):
            if value:
                self._block(value, function, only=True)
        for handler in getattr(statement, "handlers", ()):
            self._block(handler.body, function, only=True)

    def _expression(self, node: ast.expr, function: str) -> None:
        if isinstance(node, ast.IfExp):
            sign = self._sign(node.test)
            if sign is not None:
                self.found.append((function, node.body if sign else node.orelse))
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            signs = [self._sign(value) for value in node.values]
            if True in signs:
                after = node.values[signs.index(True) + 1 :]
                self.found += [(function, value) for value in after]
        self._walk(node, function)

    def _sign(self, node: ast.expr) -> bool | None:
        """Return True for what holds on CUDA only, False for what holds elsewhere, else None."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            sign = self._sign(node.operand)
            return None if sign is None else not sign
        if isinstance(node, ast.BoolOp):
            # all of them hold, so one that holds on CUDA only suffices; and the other way around
            wanted = isinstance(node.op, ast.And)
            return wanted if wanted in map(self._sign, node.values) else None
        if isinstance(node, ast.Name | ast.Attribute) and _name(node) in self._conditions:
            return True
        return _comparison(node)


def _given_conditions(module: ast.Module) -> Iterator[str]:
    """Yield names that the module gives a condition on the device."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and _comparison(node.value) is True:
            yield from map(_name, node.targets)
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    yield from map(_name, target.elts)


def _comparison(node: ast.expr) -> bool | None:
    if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
        return True
    if isinstance(node, ast.Call) and _is_question(node.func):
        return True
    if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
        return None
    [operation], [right] = node.ops, node.comparators
    value = right.value if isinstance(right, ast.Constant) else _name(right).lower()
    if value not in ("cuda", "cpu") or _name(node.left) not in DEVICES:
        return None
    is_equal = isinstance(operation, ast.Eq)
    return is_equal == (value == "cuda")


def _is_question(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute) and _name(node.value) == "cuda" and (node.attr in QUESTIONS)
    )


def _name(node: ast.AST) -> str:
    """Return the last name of `a`, `a.b` or `a()`; an empty text for others."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _uses_cuda(node: ast.AST) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.keyword) and part.arg == "pin_memory":
            return True
        if isinstance(part, ast.Attribute):
            if part.attr == "pin_memory":
                return True
            of_torch = isinstance(part.value, ast.Attribute) and ast.unparse(part.value) in (
                "torch.cuda"
            )
            if of_torch and part.attr not in QUESTIONS:
                return True
    return False


def _heads(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions that a compound statement evaluates itself."""
    if isinstance(statement, ast.If | ast.While):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    return []


def _leaves(statements: Sequence[ast.stmt]) -> bool:
    return isinstance(statements[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
