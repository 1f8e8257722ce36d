"""Imports point one way: pallas_kernels <- glm5next_jax <- convert <- tests, benchmarks.

Kernels know JAX and NumPy only, and torch and transformers are seen by tests/oracles alone.
"""

import pathlib
import sys

import pytest

from tests.source_tree import FOLDERS, ROOT, imports, python_files

# What each folder may import of the project. Benchmarks share tests/cases.py, and have tests.
ARROWS = {
    "pallas_kernels": {"pallas_kernels"},
    "glm5next_jax": {"pallas_kernels", "glm5next_jax"},
    "convert": {"pallas_kernels", "glm5next_jax", "convert"},
    "examples": {"pallas_kernels", "glm5next_jax", "convert", "examples"},
    "tests": set(FOLDERS),
    "benchmarks": set(FOLDERS),
}
KERNEL_LIBRARIES = {"jax", "numpy"}
ORACLE_LIBRARIES = {"torch", "transformers"}
ORACLES = pathlib.PurePath("tests", "oracles")


def violations(root: pathlib.Path) -> list[str]:
    """One line per import that a rule forbids, over every Python file under `root`."""
    found = []
    for folder in FOLDERS:
        for path in python_files(folder, root):
            where = path.relative_to(root)
            for line, module in imports(path.read_text(), folder):
                top = module.split(".")[0]
                own = top in FOLDERS
                if own and top not in ARROWS[folder]:
                    found.append(f"{where}:{line}: {folder} must not import {module}")
                if top in ORACLE_LIBRARIES and ORACLES not in where.parents:
                    found.append(f"{where}:{line}: {module} is for {ORACLES.as_posix()} alone")
                elif folder == "pallas_kernels" and not own and top not in KERNEL_LIBRARIES:
                    if top not in sys.stdlib_module_names:
                        found.append(f"{where}:{line}: kernels must not import {module}")
    return found


def test_the_project_keeps_the_layers():
    assert violations(ROOT) == []


def test_the_rules_see_every_folder_that_has_code():
    seen = {folder for folder in FOLDERS if python_files(folder)}
    assert seen >= {"pallas_kernels", "glm5next_jax", "convert", "tests"}


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("pallas_kernels/a.py", "import glm5next_jax.model", "must not import glm5next_jax.model"),
        ("pallas_kernels/kda/a.py", "from flax import nnx", "kernels must not import flax"),
        ("pallas_kernels/a.py", "def f():\n    import scipy.linalg", "a.py:2: kernels must not"),
        ("glm5next_jax/a.py", "from convert.converter import convert", "must not import convert"),
        ("glm5next_jax/a.py", "import tests.cases", "must not import tests.cases"),
        ("glm5next_jax/a.py", "import torch", "torch is for tests/oracles alone"),
        ("convert/a.py", "import benchmarks", "must not import benchmarks"),
        ("convert/a.py", "import importlib\nimportlib.import_module('torch')", "a.py:2: torch"),
        ("tests/a.py", "import pytest\npytest.importorskip('torch')", "a.py:2: torch"),
    ],
)
def test_a_planted_import_is_found(tmp_path, path, source, message):
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    (found,) = violations(tmp_path)
    assert message in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pallas_kernels/a.py", "import functools\nimport jax.numpy\nfrom . import dispatch"),
        ("glm5next_jax/a.py", "from pallas_kernels import chunk_kda\nfrom flax import nnx"),
        ("convert/a.py", "from glm5next_jax.config import Glm5NextConfig"),
        ("tests/oracles/test_a.py", "import torch\nimport convert"),
        ("benchmarks/a.py", "from tests.cases import TOLERANCES"),
    ],
)
def test_an_allowed_import_is_let_through(tmp_path, path, source):
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert violations(tmp_path) == []
