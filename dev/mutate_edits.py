"""The small changes that mutate.py makes: a statement goes; an operator, number or result changes.

The first assignment to a name stays: without it, whatever test runs it would fail.
"""

import ast
import re
from collections import namedtuple
from itertools import pairwise

SWAPS = {"Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">")}
SWAPS |= {"Eq": ("==", "!="), "NotEq": ("!=", "=="), "Is": ("is", "is not"), "In": ("in", "not in")}
SWAPS |= {"IsNot": (r"is\s+not", "is"), "NotIn": (r"not\s+in", "in"), "And": ("and", "or")}
SWAPS |= {"Or": ("or", "and"), "Add": (r"\+", "-"), "Sub": ("-", "+"), "Mult": (r"\*", "/")}
SWAPS |= {"Div": ("/", "*")}
# source[begin:end] becomes new; a test that runs one of lines first to last sees it.
Edit = namedtuple("Edit", "kind first last begin end new")


def edits(source: bytes) -> list[Edit]:
    """Every small change of a file: none of annotations, f-strings, help texts and main guards."""
    starts, found = [0], []
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node, first, bound):
        def add(kind, begin, end, new):
            found.append(Edit(kind, min(first, node.lineno), node.end_lineno, begin, end, new))

        def swap(operator, left, right):
            if type(operator).__name__ in SWAPS:
                old, new = SWAPS[type(operator).__name__]
                begin, end = span(left)[1], span(right)[0]
                gap = re.sub(old, new, source[begin:end].decode(), count=1)
                add(f"operator to {new}", begin, end, gap)

        first = node.lineno if isinstance(node, ast.stmt) else first
        if isinstance(node, ast.FunctionDef):
            bound = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        match node:
            case ast.JoinedStr() | ast.keyword(arg="help"):
                return
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return
            case ast.Compare(left=left, comparators=others):
                for operator, (one, other) in zip(node.ops, pairwise([left, *others]), strict=True):
                    swap(operator, one, other)
            case ast.BoolOp():
                for one, other in pairwise(node.values):
                    swap(node.op, one, other)
            case ast.BinOp():
                swap(node.op, node.left, node.right)
            case ast.AugAssign():
                swap(node.op, node.target, node.value)
            case ast.Constant(value=bool()):
                add("True / False", *span(node), str(not node.value))
            case ast.Constant(value=int() | float()):
                add("number + 1", *span(node), repr(node.value + 1))
            case ast.UnaryOp(op=ast.Not()):
                add("not x to x", span(node)[0], span(node)[0] + len("not"), "")
            case ast.Return(value=ast.expr()):
                add("returns None", *span(node.value), "None")
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                add("removed", *span(node), "pass")
            case ast.Assign():
                stored = {each.id for each in ast.walk(node) if is_stored(each)}
                if stored <= bound:
                    add("removed", *span(node), "pass")
                bound |= stored
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    visit(child, first, bound)

    visit(ast.parse(source), 1, set())
    return found


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
