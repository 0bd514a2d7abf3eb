"""Find a target and its arguments: in an imported module, or in the source of one that is not imported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Unresolved(Exception):
    """What is missing, in words for ``doctor``."""


def split(target: str) -> tuple[str, str, str]:
    """``module:Class.method`` → its three parts."""
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    return module, owner, name


def ready(module_name: str) -> bool:
    """Whether the module is imported to its end; one half-way through lacks its later classes."""
    module = sys.modules.get(module_name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def live(target: str, takes: Iterable[str] = ()) -> tuple[type, str, list[str]]:
    """Resolve in the imported module: (class, attribute, argument names without self)."""
    module_name, owner_name, name = split(target)
    owner = getattr(sys.modules[module_name], owner_name, None)
    if owner is None:
        raise Unresolved(f"{module_name} has no {owner_name}")
    function = inspect.getattr_static(owner, name, None)
    if function is None:
        raise Unresolved(f"{module_name}:{owner_name} has no {name}")
    if not inspect.isfunction(inspect.unwrap(getattr(owner, name))):
        raise Unresolved(f"{target} is not a plain method")
    names = list(inspect.signature(getattr(owner, name)).parameters)[1:]
    _require(target, names, takes)
    return owner, name, names


def static(target: str, takes: Iterable[str] = (), root: Path | None = None) -> list[str]:
    """Resolve in source, importing nothing: the argument names without self.

    ``root`` is the directory that holds the top-level package; the import path's own when None.
    """
    module_name, owner_name, name = split(target)
    tree = ast.parse(_source(module_name, root).read_text(encoding="utf-8"))
    owner = _find(tree.body, owner_name)
    if not isinstance(owner, ast.ClassDef):
        raise Unresolved(f"{module_name} has no {owner_name}")
    function = _find(owner.body, name)
    if function is None or isinstance(function, ast.ClassDef):
        raise Unresolved(f"{module_name}:{owner_name} has no {name}")
    arguments = function.args
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args][1:] + arguments.kwonlyargs]
    _require(target, names, takes)
    return names


def _require(target: str, names: list[str], takes: Iterable[str]) -> None:
    missing = [wanted for wanted in takes if wanted not in names]
    if missing:
        raise Unresolved(f"{target} has no argument {', '.join(missing)}")


def _source(module_name: str, root: Path | None) -> Path:
    """The module's file. Found by path, since find_spec would import the packages above it."""
    parts = module_name.split(".")
    if root is None:
        top = importlib.util.find_spec(parts[0])
        if top is None or not top.submodule_search_locations:
            raise Unresolved(f"{parts[0]} is not installed")
        root = Path(next(iter(top.submodule_search_locations))).parent
    stem = root.joinpath(*parts)
    for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise Unresolved(f"there is no module {module_name}")


def _find(body: list[Any], name: str) -> Node | None:
    """The last definition of ``name`` in ``body``, also inside ``if`` and ``try``."""
    found: Node | None = None
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                found = node
        elif isinstance(node, ast.If | ast.Try):
            handlers = [statement for h in getattr(node, "handlers", []) for statement in h.body]
            found = _find([*node.body, *node.orelse, *handlers], name) or found
    return found
