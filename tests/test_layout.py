"""The folders are the packages: nothing is forgotten in a wheel, no import goes upward."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
FOLDERS = {"format": "rangekv.format", "engine": "rangekv.engine", "rangectl": "rangectl"}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# What each package must not import, directly or inside a function.
FORBIDDEN = {
    "format": {"rangekv.engine", "rangectl", "numpy", "torch", "click", "rich", "vllm"},
    "engine": {"rangectl", "click", "rich"},
    "rangectl": {"vllm"},
}


def packages_in_folders() -> dict[str, str]:
    """Map each package's import name to its folder."""
    found = {}
    for init in sorted(path for path in SOURCES if path.name == "__init__.py"):
        folder = init.parent.relative_to(ROOT)
        top, *rest = folder.parts
        found[".".join([FOLDERS[top], *rest])] = folder.as_posix()
    return found


def test_the_package_list_is_what_lies_in_the_folders():
    assert TOOL["package-dir"] == packages_in_folders()
    assert sorted(TOOL["packages"]) == sorted(packages_in_folders())


def test_every_folder_with_sources_is_a_package():
    assert {path.parent for path in SOURCES} == {
        path.parent for path in SOURCES if path.name == "__init__.py"
    }


def test_types_are_shipped():
    for name in FOLDERS.values():
        assert TOOL["package-data"][name] == ["py.typed"]
    for folder in FOLDERS:
        assert (ROOT / folder / "py.typed").exists()


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_imports_go_down_only(folder):
    for path in (one for one in SOURCES if one.relative_to(ROOT).parts[0] == folder):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                bad = [
                    one for one in FORBIDDEN[folder] if name == one or name.startswith(one + ".")
                ]
                assert not bad, f"{path.relative_to(ROOT)} line {node.lineno} imports {name}"
