"""Small breakages of a source file: one operator, constant, condition, argument or statement each.

Docstrings, messages, annotations, decorators, imports and ``__repr__`` are left as they are. Apart from
``tools/mutate.py``, which runs tests over them.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
OPERATORS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift},
}
IN_CUDA = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || "}
IN_CUDA |= {" || ": " && ", " + ": " - ", " - ": " + ", "min(": "max(", "max(": "min("}
# Calls whose arguments are messages, help or names of types.
QUIET = re.compile(r"(print|echo|secho|warn|warn_once|Option|Argument|TypeVar|cast|log|debug|info|warning|error)$")


@dataclass(frozen=True)
class Mutation:
    path: str
    line: int
    kind: str
    start: int  # in bytes
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


class _Places(ast.NodeVisitor):
    """All mutations of one module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.found, self.depth = path, [], 0
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.visit(ast.parse(source))

    def _put(self, kind: str, node: ast.AST, text: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        self.found.append(Mutation(self.path, node.lineno, kind, start, end, text))

    def _changed(self, kind: str, node: ast.expr, **fields) -> None:
        """``node`` with other fields, in parentheses."""
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        self._put(kind, node, f"({ast.unparse(other)})")

    def _negated(self, test: ast.expr) -> None:
        self._put("negate a condition", test, f"(not ({ast.unparse(test)}))")

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            if isinstance(node, ast.Raise):
                self._put("drop a statement", node, "pass")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name not in ("__repr__", "__str__"):
                self.depth += 1
                for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                    self.visit(child)
                self.depth -= 1
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                self.visit(child)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
        elif not _is_quiet(node):
            getattr(self, f"at_{type(node).__name__}", lambda node: None)(node)
            self.generic_visit(node)

    def at_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], OPERATORS[type(op)](), *node.ops[i + 1 :]]
            self._changed("change a comparison", node, ops=ops)

    def at_BoolOp(self, node: ast.BoolOp) -> None:
        self._changed("and/or", node, op=OPERATORS[type(node.op)]())
        for i in range(len(node.values)):
            self._changed("drop an operand", node, values=[*node.values[:i], *node.values[i + 1 :]])

    def at_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(side, ast.JoinedStr) or _is(side, str) for side in (node.left, node.right))
        alias = isinstance(node.op, ast.BitOr) and not self.depth  # of types
        if type(node.op) in OPERATORS and not text and not alias:
            self._changed("change an operator", node, op=OPERATORS[type(node.op)]())

    def at_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._put("drop not or minus", node, f"({ast.unparse(node.operand)})")

    def at_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._put("change a constant", node, str(not node.value))
        elif isinstance(node.value, int):
            for by in (1, -1):
                self._put("change a constant", node, f"({node.value + by})")
        elif isinstance(node.value, float):
            self._put("change a constant", node, repr(node.value * 1.1 or 0.1))

    def at_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in SWAPPED:
            func = copy.copy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", SWAPPED[name])
            self._changed("min/max, any/all", node, func=func)
        for i, (one, two) in enumerate(pairwise(node.args)):
            if ast.dump(one) != ast.dump(two) and not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                self._changed("swap arguments", node, args=[*node.args[:i], two, one, *node.args[i + 2 :]])
        for keyword in node.keywords:
            if keyword.arg not in (None, "help"):
                self._changed("drop an argument", node, keywords=[k for k in node.keywords if k is not keyword])

    def at_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is(node.value, type(None)):
            self._put("return nothing", node, "return None")

    def at_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_quiet(node.value):
            self._put("drop a statement", node, "pass")

    def at_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._put("drop a statement", node, "pass")

    def _dropped(self, node: ast.stmt) -> None:
        self._put("drop a statement", node, "pass")

    at_AugAssign = at_Delete = at_Break = at_Continue = _dropped

    def at_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negated(node.test)

    at_While = at_IfExp = at_If

    def at_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negated(test)


def _is_quiet(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.Call) and bool(QUIET.search(ast.unparse(node.func)))


def _is(node: ast.expr, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def places(path: str, source: bytes) -> list[Mutation]:
    """All mutations of a file. CUDA sources: operators with spaces around them, outside of comments."""
    if path.endswith(".py"):
        return _Places(path, source).found
    blank = re.sub(
        rb"//[^\n]*|/\*.*?\*/|^#[^\n]*|\"[^\"\n]*\"", lambda m: re.sub(rb"[^\n]", b"_", m[0]), source, flags=re.S | re.M
    )
    return [
        Mutation(path, source.count(b"\n", 0, m.start()) + 1, "change an operator", m.start(), m.end(), there)
        for here, there in IN_CUDA.items()
        for m in re.finditer(rb"(?<!\w)" * here.endswith("(") + re.escape(here.encode()), blank)
    ]


def chosen(root: Path, within: list[str], count: int, seed: int) -> list[Mutation]:
    """``count`` mutations, each of another line. All lines with a mutation are as likely."""
    lines: dict[tuple[str, int], list[Mutation]] = {}
    for name in within:
        files = [root / name] if (root / name).is_file() else (root / name).rglob("*")
        for file in sorted(file for file in files if file.suffix in (".py", ".cu", ".cuh")):
            path = file.relative_to(root).as_posix()
            for mutation in places(path, file.read_bytes()):
                lines.setdefault((path, mutation.line), []).append(mutation)
    draw = random.Random(seed)
    return [draw.choice(lines[line]) for line in draw.sample(sorted(lines), min(count, len(lines)))]
