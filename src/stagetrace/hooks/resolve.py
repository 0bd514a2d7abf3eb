"""Find a target and its arguments: in an imported module, or in the source of one that is not imported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: These are not called with an instance first, so nothing we say about arguments would hold.
_NOT_METHODS = ("staticmethod", "classmethod", "property", "cached_property")


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
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def live(target: str, takes: Iterable[str] = (), awaits: bool = False) -> tuple[type, str, list[inspect.Parameter]]:
    """Resolve in the imported module: (class, attribute, parameters without self)."""
    module_name, owner_name, name = split(target)
    owner = getattr(sys.modules[module_name], owner_name, None)
    if not isinstance(owner, type):
        raise Unresolved(f"{module_name} has no {owner_name}")
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        raise Unresolved(f"{module_name}:{owner_name} has no {name}")
    function = getattr(owner, name)
    # As it lies in the class: a static method would be a plain function once it is taken out of it.
    if not inspect.isfunction(found):
        raise Unresolved(f"{target} is not a plain method")
    if awaits and not inspect.iscoroutinefunction(function):
        raise Unresolved(f"{target} is not a coroutine function")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    _require(target, [parameter.name for parameter in parameters], takes)
    return owner, name, parameters


def static(target: str, takes: Iterable[str] = (), root: Path | None = None, awaits: bool = False) -> list[str]:
    """Resolve in source, importing nothing: the argument names without self.

    ``root`` is the directory that holds the top-level package; the import path's own when None.
    """
    module_name, owner_name, name = split(target)
    if _class(module_name, owner_name, root) is None:
        raise Unresolved(f"{module_name} has no {owner_name}")
    function = next(_methods(module_name, owner_name, name, root), None)
    if function is None:
        raise Unresolved(f"{module_name}:{owner_name} has no {name}")
    if isinstance(function, ast.ClassDef) or any(_called(d) in _NOT_METHODS for d in function.decorator_list):
        raise Unresolved(f"{target} is not a plain method")
    if awaits and not isinstance(function, ast.AsyncFunctionDef):
        raise Unresolved(f"{target} is not a coroutine function")
    arguments = function.args
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args][1:] + arguments.kwonlyargs]
    _require(target, names, takes)
    return names


@lru_cache(maxsize=2)
def parsed(source: Path) -> ast.Module:
    """A module's syntax tree. Neighbouring rows ask for the same one; clear the cache afterwards, trees are large."""
    return ast.parse(source.read_text(encoding="utf-8"))


def _require(target: str, names: list[str], takes: Iterable[str]) -> None:
    missing = [wanted for wanted in takes if wanted not in names]
    if missing:
        raise Unresolved(f"{target} has no argument {', '.join(missing)}")


def _source(module_name: str, root: Path | None) -> Path:
    """The module's file. Found by path, since find_spec would import the packages above it."""
    parts = module_name.split(".")
    if root is None:
        top = importlib.util.find_spec(parts[0])
        if top is None:
            raise Unresolved(f"{parts[0]} is not installed")
        # A package's directory, or the file of a module that is none.
        places = [*(top.submodule_search_locations or ()), *([top.origin] if top.origin else [])]
        root = Path(places[0]).parent
    stem = root.joinpath(*parts)
    for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise Unresolved(f"there is no module {module_name}")


def _class(module_name: str, name: str, root: Path | None, depth: int = 8) -> tuple[str, ast.ClassDef] | None:
    """The class called ``name`` in a module and the module that defines it: there, or where it is imported from."""
    source = _source(module_name, root)
    body = parsed(source).body
    found = _find(body, name)
    if isinstance(found, ast.ClassDef):
        return module_name, found
    package = module_name if source.name == "__init__.py" else module_name.rpartition(".")[0]
    for node in [node for node in body if isinstance(node, ast.ImportFrom)] if depth else ():
        for alias in node.names:
            if name == (alias.asname or alias.name):
                above = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                return _class(above, alias.name, root, depth - 1)
    return None


def _methods(module_name: str, owner: str, name: str, root: Path | None, depth: int = 8) -> Iterator[Node]:
    """Definitions of a method: in the class, then in its bases, as far as their source can be found."""
    try:
        found = _class(module_name, owner, root)
    except Unresolved:  # a base in a package that is not there, or in one that has no source
        return
    if found is None:
        return
    home, definition = found
    own = _find(definition.body, name)
    if own is not None:
        yield own
    for base in definition.bases if depth else ():
        if isinstance(base, ast.Name):
            yield from _methods(home, base.id, name, root, depth - 1)


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


def _called(decorator: ast.expr) -> str:
    """The last name of ``@a.b.name`` or ``@name(...)``."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
