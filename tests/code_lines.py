"""Count code lines: lines that hold a token of code, and no docstring, comment or blank line."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def raises(path: Path) -> int:
    """Count statements that refuse or stop: `raise` with an exception, `assert`, and calls of `sys.exit`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    raised = sum(isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and bool(node.exc)) for node in nodes)
    return raised + sum(isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.exit" for node in nodes)
