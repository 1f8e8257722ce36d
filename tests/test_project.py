"""The project's files agree with each other, and source files hold nothing that they must not."""

import ast
import importlib.metadata
import re
import sys
import tomllib

import pytest

import glm5next_jax
from tests.source_tree import FOLDERS, PACKAGES, ROOT, imports, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
SOURCES = [path for folder in FOLDERS for path in python_files(folder)]
MAX_LINES = 700


def normal(name: str) -> str:
    """A distribution's name in its normal form, without extras and version."""
    bare = re.match(r"[A-Za-z0-9._-]+", name)
    assert bare is not None, name
    return re.sub(r"[-_.]+", "-", bare[0]).lower()


def fenced(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert importlib.metadata.version("glm5next-jax") == glm5next_jax.__version__
    # setuptools reads a literal without importing jax; anything else would need it at build time.
    tree = ast.parse((ROOT / "glm5next_jax" / "__init__.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [isinstance(value, ast.Constant) for value in values] == [True]


def test_the_changelog_has_a_place_for_what_is_not_released():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["glm5next-convert", "glm5next-generate"])
def test_a_console_script_resolves(name):
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert callable(script.load())


def test_the_extras_are_there():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"tpu", "cuda13", "test", "oracle", "dev"}
    # The golden data was made with these; another version is another oracle.
    assert {"torch==2.13.0", "transformers==5.24.0"} <= set(extras["oracle"])


def test_declared_dependencies_are_those_imported():
    distributions = importlib.metadata.packages_distributions()
    used = {
        normal(distribution)
        for package in PACKAGES
        for path in python_files(package)
        for _, module in imports(path.read_text(), package)
        if (top := module.split(".")[0]) not in sys.stdlib_module_names and top not in PACKAGES
        for distribution in distributions.get(top, [f"nothing-installed-provides-{top}"])
    }
    assert used == {normal(requirement) for requirement in PROJECT["dependencies"]}


def test_the_readme_commands_exist_and_ci_runs_them():
    commands = re.findall(r"^make ([a-z]+)", "".join(fenced("sh")), flags=re.MULTILINE)
    assert set(commands) == {"demo", "test"}
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), command
        assert re.search(rf"\bmake {command}\b", ci), command


def test_no_document_holds_a_placeholder():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documents += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    assert {"README.md", "numerics.md"} <= {path.name for path in documents}
    found = {
        str(path.relative_to(ROOT)): left
        for path in documents
        if (left := re.findall(r"@[A-Z]+@|<!-- measured", path.read_text()))
    }
    assert found == {}


@pytest.mark.slow
def test_the_readme_snippet_runs(monkeypatch, capsys):
    (snippet,) = fenced("python")
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "<README.md>", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_no_file_is_too_long_to_read():
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("text", ["pickle.load", "torch.load", "allow_pickle=True"])
def test_packages_never_unpickle(text):
    """Checkpoints come from strangers, and unpickling runs what they hold."""
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in python_files(package)
        if text in path.read_text()
    ]
    assert found == []
