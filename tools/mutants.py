"""The small changes that `tools/mutate.py` makes to a module's syntax tree.

One mutant is one change: an operator, a comparison, a number, a condition, a boundary function (min for max), or a statement left
out. Docstrings, annotations, messages, assertions, `raise` statements and module-level constants (sizes that trade memory for
time) stay as they are, and so does the sign of a tensor's dimension -1, which is dimension 1 of a matrix.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "any": "all",
    "all": "any",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "new_zeros": "new_ones",
    "sum": "mean",
    "exp": "expm1",
    "sqrt": "square",
}


OVER_A_DIMENSION = {"any", "argmax", "cumprod", "gather", "logsumexp", "mean", "scatter_add_", "squeeze", "sum"}
"""Tensor methods whose first argument is a dimension."""


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    Attributes:
        path: of the module.
        lines: that hold what is changed; a condition's, where it is negated.
        change: what is done there.
        source: the changed module.
    """

    path: Path
    lines: range
    change: str
    source: str


class _Sites(ast.NodeVisitor):
    """Collects what can be changed: (line, description, function that changes a copied tree's node in place)."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, str, Callable[[Any], None]]] = []

    def _add(self, node: ast.AST, change: str, apply: Callable[[Any], None]) -> None:
        self.found.append((node, change, apply))

    def visit_Module(self, node: ast.Module) -> None:
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of `zip`: a check, as assertions are
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, f"leave out {ast.unparse(node)[:60]}", lambda n: setattr(n, "value", ast.Constant(None)))
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._swap(node, "op", node.op)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap(node, "op", node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap(node, "op", node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            if type(operator) in OPERATORS:
                new = OPERATORS[type(operator)]
                change = f"{type(operator).__name__} -> {new.__name__} in {ast.unparse(node)[:60]}"
                self._add(node, change, partial(_set_comparison, i, new))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in OVER_A_DIMENSION
        if is_method and node.args and ast.unparse(node.args[0]) == "-1":
            for child in (node.func, node.args[0].operand, *node.args[1:], *node.keywords):  # type: ignore[attr-defined]
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):  # applied twice it does nothing
            change = f"drop the sign or negation of {ast.unparse(node)[:60]}"
            self._add(node, change, lambda n: setattr(n, "operand", ast.UnaryOp(copy.copy(n.op), n.operand)))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, f"{value} -> {not value}", lambda n: setattr(n, "value", not n.value))
        elif isinstance(value, (int, float)):
            self._add(node, f"{value} -> {value + 1}", lambda n: setattr(n, "value", n.value + 1))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES and node.id not in ("sum", "exp", "sqrt"):  # of Python's own, `mean` is none
            self._add(node, f"{node.id} -> {NAMES[node.id]}", lambda n: setattr(n, "id", NAMES[n.id]))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in NAMES and ast.unparse(node.value) != "math":
            self._add(node, f".{node.attr} -> .{NAMES[node.attr]}", lambda n: setattr(n, "attr", NAMES[n.attr]))
        self.generic_visit(node)

    def _swap(self, node: ast.AST, field: str, operator: ast.AST) -> None:
        new = OPERATORS.get(type(operator))
        if new is not None:
            change = f"{type(operator).__name__} -> {new.__name__} in {ast.unparse(node)[:60]}"
            self._add(node, change, lambda n: setattr(n, field, new()))

    def _negate(self, node: ast.If | ast.IfExp) -> None:
        change = f"negate {ast.unparse(node.test)[:60]}"
        self._add(node, change, lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)))
        self.generic_visit(node)


def _set_comparison(index: int, new: type[ast.cmpop], node: ast.Compare) -> None:
    node.ops[index] = new()


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module's file, in the order of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    sites = _Sites()
    sites.visit(tree)
    nodes = list(ast.walk(tree))
    place = {id(node): i for i, node in enumerate(nodes)}
    mutants = []
    for node, change, apply in sites.found:
        changed = copy.deepcopy(tree)
        apply(list(ast.walk(changed))[place[id(node)]])
        source = ast.unparse(ast.fix_missing_locations(changed))
        place_of = node.test if isinstance(node, ast.If | ast.IfExp) else node
        lines = range(place_of.lineno, place_of.end_lineno + 1)  # type: ignore[attr-defined]
        mutants.append(Mutant(path, lines, change, source))
    return sorted(mutants, key=lambda mutant: mutant.lines.start)
