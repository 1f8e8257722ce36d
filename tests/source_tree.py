"""The project's own source, read as text: which files there are and what they import."""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "glm5next_jax", "convert")
FOLDERS = (*PACKAGES, "examples", "tests", "benchmarks")

_IMPORTING_CALLS = ("import_module", "__import__", "importorskip")


def python_files(folder: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The Python files under root/folder, sorted; none where the folder is not there."""
    return sorted((root / folder).rglob("*.py"))


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted module) for each import in `source`, at any depth.

    Calls such as import_module("torch") count too. A relative import is reported as an import of
    `package`, the top-level package that the source belongs to.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, package if node.level else node.module or package
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name in _IMPORTING_CALLS and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)
