"""Hashes of source code that change with its behaviour alone, and the modules that a folder of
tests covers.

A module's hash is computed from its syntax tree without comments, docstrings, positions and
``pass``, so that neither formatting nor the Python version that computes it matters. Nothing is
imported or run, since importing the project would need torch. Parsing all of it takes a second or
two; what a file says is kept in ``build/`` under the hash of its text.

A test folder covers

- its own test files that hold one of the markers in question (``gpu``, say), and the modules that
  these name in strings, as programs that they start do;
- the subpackage of the same path: ``tests/placer/devices`` covers all of ``placer/devices``. A
  folder that mirrors nothing, as ``tests/end_to_end``, covers every package of the project;
- whatever these modules import, directly or indirectly, inside the project (test helpers included).
"""

from __future__ import annotations

import ast
import gc
import hashlib
import multiprocessing
import os
import pickle
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of syntax trees that say nothing about behaviour: loads and stores follow from the
position in the tree."""

_BODIES = frozenset({"body", "orelse", "finalbody"})

_DOTTED = re.compile(r"\b[a-z_]\w*(?:\.[a-z_]\w*)+")
"""A name that may be a module's, somewhere in a string."""

_SHARE = 16
"""Files that a process parses at a time: many enough that handing them over costs little."""


@dataclass(frozen=True)
class Module:
    """What one source file says.

    Attributes:
        digest: changes when, and only when, the code without comments, docstrings and formatting
            does.
        imports: dotted names that the file imports when it runs, in functions too: ``from a import
            b`` gives ``a.b``.
        type_imports: the names that it imports under ``if TYPE_CHECKING``, each with what it stands
            for.
        markers: names of pytest's markers that the file uses: ``gpu`` of ``pytest.mark.gpu``.
    """

    digest: str
    imports: frozenset[str]
    type_imports: dict[str, str]
    markers: frozenset[str] = frozenset()


def read_module(path: Path, package: str, with_strings: bool = False) -> Module:
    """Return the hash of a source file and the names that it imports.

    Args:
        path: of the file.
        package: the dotted name of the package that relative imports start from.
        with_strings: whether dotted names in strings count as imports.
    """
    reader = _Reader(package, with_strings)
    with _without_collector():
        reader.write(ast.parse(path.read_bytes()), written := [])
    digest = hashlib.sha256(" ".join(written).encode()).hexdigest()
    imports = frozenset(reader.imports | reader.attributes_of_imports())
    return Module(digest, imports, reader.type_imports, frozenset(reader.markers))


class _Reader:
    """Describes syntax trees in words, and notes what they import."""

    def __init__(self, package: str, with_strings: bool) -> None:
        self._package = package
        self._with_strings = with_strings
        self._aliases: dict[str, str] = {}
        self._attributes: set[tuple[str, str]] = set()
        self.imports: set[str] = set()
        self.type_imports: dict[str, str] = {}
        self.markers: set[str] = set()

    def attributes_of_imports(self) -> set[str]:
        """Return ``a.b`` for ``import a`` and a use of ``a.b``: packages may resolve b when it is
        first used."""
        return {
            f"{self._aliases[name]}.{part}"
            for name, part in self._attributes
            if name in self._aliases
        }

    def write(self, node: Any, written: list[str]) -> None:
        """Append the words that describe a syntax tree."""
        kind = type(node)
        if kind is ast.Name:
            written += ("Name", node.id)
            return
        if kind is ast.Constant:
            if self._with_strings and isinstance(node.value, str):
                self.imports.update(_DOTTED.findall(node.value))
            # repr depends on the Unicode tables of the Python version
            written += ("Constant", ascii(node.value))
            return
        if kind is ast.JoinedStr:
            self._write_joined(node, written)
            return
        if kind is ast.Import or kind is ast.ImportFrom:
            for alias, name in self._imported(node):
                self.imports.add(name)
                self._aliases[alias] = name
        elif kind is ast.Attribute and type(node.value) is ast.Name:
            self._attributes.add((node.value.id, node.attr))
        elif kind is ast.Attribute and type(node.value) is ast.Attribute:
            if node.value.attr == "mark":
                self.markers.add(node.attr)
        elif kind is ast.If and _is_type_checking(node.test):
            found = (
                self._imported(item)
                for item in node.body
                if isinstance(item, ast.Import | ast.ImportFrom)
            )
            self.type_imports.update(pair for pairs in found for pair in pairs)
            outer, self.imports = self.imports, set()
            self._write_fields(node, kind, written)
            self.imports = outer
            return
        self._write_fields(node, kind, written)

    def _write_fields(self, node: Any, kind: type, written: list[str]) -> None:
        written.append(kind.__name__)
        for field in _fields_of(kind):
            value = getattr(node, field, None)
            # Newer versions add fields, and leave out or fill in empty ones.
            if value is None or value == []:
                continue
            written.append(field)
            if isinstance(value, ast.AST):
                self.write(value, written)
            elif isinstance(value, list):
                items = (
                    [item for item in value if not _is_without_effect(item)]
                    if field in _BODIES
                    else value
                )
                written.append(str(len(items)))
                for item in items:
                    if isinstance(item, ast.AST):
                        self.write(item, written)
                    else:
                        written.append(ascii(item))
            else:
                written.append(ascii(value))

    def _write_joined(self, node: ast.JoinedStr, written: list[str]) -> None:
        """An f-string, with its constant parts joined: versions cut them differently."""
        written.append("JoinedStr")
        text = ""
        for value in node.values:
            if isinstance(value, ast.Constant):
                self.write(value, [])
                text += str(value.value)
                continue
            assert isinstance(value, ast.FormattedValue)
            written += (ascii(text), str(value.conversion))
            text = ""
            self.write(value.value, written)
            if value.format_spec is not None:
                self.write(value.format_spec, written)
        written += (ascii(text), "end")

    def _imported(self, node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
        """The names that an import binds, each with what it stands for."""
        if isinstance(node, ast.Import):
            # ``import a.b`` binds a; the module a.b is imported all the same.
            return [(item.asname or item.name, item.name) for item in node.names]
        base = node.module or ""
        if node.level:
            parents = self._package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        return [(item.asname or item.name, f"{base}.{item.name}") for item in node.names]


class Sources:
    """The source files of a project, by the names under which they import one another.

    Args:
        root: the folder of ``pyproject.toml``, which says where packages and test helpers are.
        markers: of pytest. A test file matters here if it uses one of them.
    """

    def __init__(self, root: Path, markers: tuple[str, ...] = ("gpu",)) -> None:
        self.root = root
        self.markers = markers
        settings = tomllib.loads((root / "pyproject.toml").read_text())
        setuptools = settings["tool"]["setuptools"]
        moved: dict[str, str] = setuptools.get("package-dir", {})
        tops = {name.partition(".")[0] for name in setuptools["packages"]}
        self._packages = {name: root / moved.get(name, name) for name in sorted(tops)}
        helpers: list[str] = settings["tool"]["pytest"]["ini_options"].get("pythonpath", [])
        self._folders = [root, *(root / name for name in helpers)]
        self._known: dict[Path, Module] = {}
        self._edges: dict[Path, set[Path]] = {}
        self._names: dict[Path, str] = {}
        self._found: dict[str, Path | None] = {}
        self._imported: dict[str, tuple[Path, ...]] = {}

    @cached_property
    def marked_tests(self) -> dict[str, list[Path]]:
        """The test files that use one of the markers, by their folder."""
        return self.tests_with(*self.markers)

    def tests_with(self, *markers: str) -> dict[str, list[Path]]:
        """Return the test files that use one of some markers, by their folder."""
        found: dict[str, list[Path]] = {}
        # The words may stand in a string or comment alone: the syntax tree decides.
        for path in self._tests_that_name(markers):
            if not self._module(path).markers.isdisjoint(markers):
                found.setdefault(self._name(path.parent), []).append(path)
        return found

    def _tests_that_name(self, markers: tuple[str, ...]) -> list[Path]:
        """The test files whose text holds one of the markers. Most hold none and are not parsed."""
        words = [f"mark.{marker}".encode() for marker in markers]
        found = []
        for path in sorted((self.root / "tests").rglob("test_*.py")):
            text = path.read_bytes()
            if any(word in text for word in words):
                found.append(path)
        return found

    def covered(self, folder: str) -> set[Path]:
        """Return the files that a test folder covers.

        Args:
            folder: relative to the root, as ``tests/placer/devices``.
        """
        waiting = self._own(folder)
        reached = set(waiting)
        while waiting:
            new = self._imports(waiting.pop()) - reached
            reached |= new
            waiting += new
        return reached

    def _own(self, folder: str) -> list[Path]:
        """The files that a folder covers whatever they import."""
        mirrored = self.root.joinpath(*Path(folder).parts[1:])
        if not any(mirrored.glob("*.py")):
            packages = list(self._packages.values())
        else:  # a package as a whole is no more than its tests import
            packages = [mirrored] if mirrored.parent != self.root else []
        return [
            *self.marked_tests.get(folder, []),
            *(path for one in packages for path in one.rglob("*.py")),
        ]

    def hash_of(self, folder: str) -> str:
        """Return one hash of all files that a test folder covers; where a file is counts too."""
        lines = sorted(
            f"{self._name(path)} {self._module(path).digest}" for path in self.covered(folder)
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _imports(self, path: Path) -> set[Path]:
        """The project's files that a file imports itself."""
        if path not in self._edges:
            self._edges[path] = {
                file for name in self._module(path).imports for file in self._files_of(name)
            }
        return self._edges[path]

    def _files_of(self, name: str) -> tuple[Path, ...]:
        """The files that run when a dotted name is imported. Many modules import the same name."""
        if name not in self._imported:
            self._imported[name] = tuple(self._find_files(name))
        return self._imported[name]

    def _find_files(self, name: str) -> Iterator[Path]:
        """The packages around a dotted name, then its own file."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found = self._path(".".join(parts[:end]))
            if found is not None:
                yield found
                continue
            # A name inside a module. Its package may say under TYPE_CHECKING alone which module it
            # comes from, and import that module when the name is first used.
            parent = self._path(".".join(parts[: end - 1]))
            if parent is not None and (
                hidden := self._module(parent).type_imports.get(parts[end - 1])
            ):
                yield from self._files_of(hidden)
            return

    @cached_property
    def text_hash(self) -> str:
        """Return one hash of all source files: while it stays, every other hash stays."""
        places = [*self._packages.values(), self.root / "benchmarks", self.root / "tests"]
        paths = sorted({path for place in places for path in place.rglob("*.py")})
        lines = [
            f"{self._name(path)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def load(self) -> None:
        """Parse all files that a folder with marked tests covers, in as many processes as there are
        processors."""
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if count == 1 or "fork" not in multiprocessing.get_all_start_methods():
            return  # each is parsed when it is needed
        # The tests are parsed here, not in ``marked_tests`` before the processes start.
        todo = set(self._tests_that_name(self.markers))
        todo |= {path for place in self._packages.values() for path in place.rglob("*.py")}
        todo -= self._known.keys()
        kept = self._kept()
        with multiprocessing.get_context("fork").Pool(count) as pool:
            while todo:
                keys = {path: self._key(path) for path in todo}
                new = [path for path in todo if keys[path] not in kept]
                given = [(path, *self._described(path)) for path in new]
                parsed = pool.starmap(read_module, given, _SHARE)
                kept |= zip((keys[path] for path in new), parsed, strict=True)
                self._known |= {path: kept[keys[path]] for path in todo}
                todo = {file for path in todo for file in self._imports(path)} - self._known.keys()
        self._keep({self._key(path): module for path, module in self._known.items()})

    def _module(self, path: Path) -> Module:
        if path not in self._known:
            self._known[path] = read_module(path, *self._described(path))
        return self._known[path]

    @property
    def _store(self) -> Path:
        """The file that holds what earlier processes parsed."""
        return self.root / "build" / "modules.pickle"

    def _kept(self) -> dict[tuple[str, str, bool], Module]:
        """What earlier processes parsed, by ``_key``."""
        try:
            kept: dict[tuple[str, str, bool], Module] = pickle.loads(self._store.read_bytes())
        except Exception:  # no file, or a file of other code
            return {}
        return kept

    def _keep(self, modules: dict[tuple[str, str, bool], Module]) -> None:
        """Write what was parsed for later processes; where the folder cannot be written, they parse
        again."""
        with suppress(OSError):
            self._store.parent.mkdir(exist_ok=True)
            part = self._store.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(modules))
            part.replace(self._store)

    def _key(self, path: Path) -> tuple[str, str, bool]:
        """What decides what a file says: its text and this program's, and how it is read."""
        text = hashlib.sha256(_own_text() + path.read_bytes()).hexdigest()
        return text, *self._described(path)

    def _name(self, path: Path) -> str:
        """A file's path from the root."""
        if path not in self._names:
            self._names[path] = path.relative_to(self.root).as_posix()
        return self._names[path]

    def _described(self, path: Path) -> tuple[str, bool]:
        """The package of a file, and whether its strings may name modules: tests start programs
        that import some."""
        return self._package_of(path), path.name.startswith("test_")

    def _package_of(self, path: Path) -> str:
        """The dotted name of the folder that holds a file; a package's own file counts as inside
        it."""
        parts = self._name(path.parent).split("/")
        for name, folder in self._packages.items():
            if folder.name == parts[0]:
                return ".".join([name, *parts[1:]])
        return ".".join(parts)

    def _path(self, name: str) -> Path | None:
        """The file of a module, or None if it is not one of the project's."""
        if name not in self._found:
            top, *rest = name.split(".")
            tops = (
                [self._packages[top]]
                if top in self._packages
                else [folder / top for folder in self._folders]
            )
            places = [place.joinpath(*rest) for place in tops]
            files = [
                file
                for place in places
                for file in (place / "__init__.py", place.with_suffix(".py"))
            ]
            self._found[name] = next((file for file in files if name and file.is_file()), None)
        return self._found[name]


@cache
def _own_text() -> bytes:
    return Path(__file__).read_bytes()


@cache
def _fields_of(kind: type) -> tuple[str, ...]:
    """The fields of a kind of node that say something about behaviour."""
    return tuple(field for field in kind._fields if field not in _IGNORED)  # type: ignore[attr-defined]


def _is_without_effect(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, another string that nobody reads, or ``pass``."""
    kind = type(statement)
    if kind is ast.Expr:
        value = statement.value  # type: ignore[attr-defined]
        return type(value) is ast.Constant and type(value.value) is str
    return kind is ast.Pass


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Parsing makes many objects and no cycles; looking for cycles would triple its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
