"""The record of GPU tests: hashes that follow behaviour alone, what a folder covers, and what runs
and checks write."""

from __future__ import annotations

import ast
import importlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import gpu_record
import pytest
import run_record
from module_hashes import Sources, read_module

ROOT = Path(__file__).parent.parent


@pytest.fixture
def digest(tmp_path: Path) -> Any:
    """``digest(source)`` is the hash of a module with this text."""

    def of(source: str) -> str:
        path = tmp_path / "module.py"
        path.write_text(source)
        return read_module(path, "package").digest

    return of


SAME = {
    "comments": ("x = 1", "# why\nx = 1  # here"),
    "docstrings": (
        "def f():\n    return 1",
        '"""A module."""\ndef f():\n    """A function."""\n    return 1',
    ),
    "a docstring alone": ('class A(B):\n    """Text."""', "class A(B):\n    pass"),
    "descriptions of attributes": ("x = 1", 'x = 1\n"""So many."""'),
    "quotes": ("x = 'a'", 'x = "a"'),
    "lines": ("f(a, b)", "f(\n    a,\n    b,\n)"),
    "parentheses": ("x = a + b * c", "x = (a + (b * c))"),
    "joined strings": ("x = 'ab'", "x = ('a'\n     'b')"),
    "joined f-strings": ("x = f'a{b}c'", "x = (f'a{b}'\n     'c')"),
    "digits": ("x = 1000000", "x = 1_000_000"),
    "a unicode prefix": ("x = 'a'", "x = u'a'"),
    "blank lines": ("x = 1\ny = 2", "x = 1\n\n\ny = 2\n"),
    "semicolons": ("x = 1\ny = 2", "x = 1; y = 2"),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_formatting_comments_and_docstrings_leave_a_hash_as_it_is(
    digest: Any, one: str, other: str
) -> None:
    assert digest(one) == digest(other)


DIFFERENT = {
    "a number": ("x = 1", "x = 2"),
    "a type of number": ("x = 1", "x = 1.0"),
    "a truth value": ("x = 1", "x = True"),
    "none and nothing": ("return_ = f(None)", "return_ = f()"),
    "zero and none": ("x = 0", "x = None"),
    "a name": ("x = a", "x = b"),
    "a name and its string": ("x = a", "x = 'a'"),
    "bytes": ("x = 'a'", "x = b'a'"),
    "an operator": ("x = a < b", "x = a <= b"),
    "an order": ("a = 1\nb = 2", "b = 2\na = 1"),
    "a default": ("def f(a=1): ...", "def f(a=2): ..."),
    "a default's place": ("def f(a, b=1): ...", "def f(a=1, b=1): ..."),
    "a keyword-only default": ("def f(*, a, b=1): ...", "def f(*, a=1, b): ..."),
    "a decorator": ("@a\ndef f(): ...", "def f(): ..."),
    "a nesting": ("if a:\n    b()\n    c()", "if a:\n    b()\nc()"),
    "an else": ("if a:\n    b()\nelse:\n    c()", "if a:\n    b()\nif not a:\n    c()"),
    "a conversion": ("x = f'{a}'", "x = f'{a!r}'"),
    "a format": ("x = f'{a:2}'", "x = f'{a:3}'"),
    "text of an f-string": ("x = f'a{b}'", "x = f'{b}a'"),
    "two values of an f-string": ("x = f'{a}{b}'", "x = f'{a + b}'"),
    "a pattern": ("match a:\n    case None:\n        b()", "match a:\n    case True:\n        b()"),
    "a star": ("f(a)", "f(*a)"),
    "a merged mapping": ("x = {'a': 1, **b}", "x = {'a': 1, 'b': b}"),
    "a string that is used": ("f('a')", "f('b')"),
    "an import": ("import a", "import a as b"),
    "a level": ("from . import a", "from .. import a"),
    "a slice": ("x = a[1:]", "x = a[:1]"),
    "a raise": ("raise a", "raise a from None"),
    "an asynchronous loop": (
        "async def f():\n    return [x async for x in a]",
        "async def f():\n    return [x for x in a]",
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_change_of_behaviour_changes_a_hash(digest: Any, one: str, other: str) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "placer" / "devices").glob("*.py")), ids=lambda path: path.name
)
def test_a_module_that_is_written_anew_from_its_syntax_tree_has_the_same_hash(
    digest: Any, path: Path
) -> None:
    assert digest(ast.unparse(ast.parse(path.read_text()))) == digest(path.read_text())


class _Changed(ast.NodeTransformer):
    """Adds one to the number at this place among the numbers of a module."""

    def __init__(self, place: int) -> None:
        self.left = place

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if type(node.value) not in (int, float):
            return node
        self.left -= 1
        return ast.Constant(node.value + 1) if self.left == -1 else node


def test_every_number_of_a_module_counts(digest: Any) -> None:
    source = (ROOT / "placer" / "devices" / "timing" / "sustained_load.py").read_text()
    count = sum(
        isinstance(n, ast.Constant) and type(n.value) in (int, float)
        for n in ast.walk(ast.parse(source))
    )
    changed = {
        digest(ast.unparse(_Changed(place).visit(ast.parse(source)))) for place in range(count)
    }
    assert count > 5 and len(changed) == count and digest(source) not in changed


EVERY_SYNTAX = r'''
"""A module with what versions of Python write into syntax trees in their own ways."""
from __future__ import annotations
import a.b as c, d
from .e import (f, g as h)
class A(B, metaclass=C):
    """A class."""
    x: int = 1
    y: str
    def __init__(self, a, /, b: int = 2, *rest, c, d=None, **more) -> None:
        self.a, (self.b, *self.c) = a, b
        super().__init__()
    async def run(self):
        async with a as b, c: await d
        async for x in y: yield x
        else: return
@decorated(1, *two, three=3, **four)
def function(x=(lambda a, *b: a), *, y): return x
value = f"a{b!r:>{width}}c{d:}e" "f" f"{{g}}{h=}" + "\N{SNOWMAN}\U0001fae8\x00" + rb"\x00".decode()
numbers = 1_000, 1e3, 2j, 0xFF, -1, ..., None, True
if (found := find(x)) is not None and 1 < x <= 2 or not y: pass
elif x: "text that nobody reads"
else: del x, y[1:2, ..., ::3]
try: pass
except (A, B) as error: raise C from error
except D: raise
else: assert x, "why"
finally: global z
try: pass
except* E: pass
while x if y else z: break
with open(a) as b, c: d @= e ** f
match x:
    case {"a": 1, **rest} | [1, *_] if y: pass
    case A(b=c, d=None) as e: pass
    case None | True | "a" | -1 | _: pass
items = [*a, *{b: c for b in d if e if f}, {**g, "h": i}, {j for j in k}, a[*b]]
'''


def test_a_hash_is_the_same_on_every_version_of_python(digest: Any) -> None:
    """Fixed here, as the versions that run this test compare themselves with it."""
    assert (
        digest(EVERY_SYNTAX) == "b27ddeb78d51c7ddef73687f08916d914633c269b854716d153aafb7caee462d"
    )


def _other_pythons() -> dict[str, str]:
    """The other versions of Python that are installed, by their names."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(11, 20):
        name = f"python3.{minor}"
        for path in [shutil.which(name), *pyenv.glob(f"3.{minor}.*/bin/{name}")]:
            # The first one may be a shim of pyenv for a version that is not selected here, which
            # fails.
            if (
                path
                and not subprocess.run(
                    [path, "-c", ""], capture_output=True, check=False
                ).returncode
            ):
                found[name] = str(path)
    found.pop(f"python3.{sys.version_info.minor}", None)
    return found


@pytest.mark.integration
def test_other_versions_of_python_give_every_folder_the_same_hash() -> None:
    others = _other_pythons()
    if not others:
        pytest.skip("no other version of Python is installed")
    program = "import sys; from pathlib import Path; from module_hashes import Sources; "
    program += "s = Sources(Path(sys.argv[1]));"
    program += "print(*sorted(s.hash_of(folder) for folder in s.marked_tests))"
    answers = {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")}
    for version, path in {"here": sys.executable, **others}.items():
        command = [path, "-S", "-c", program, str(ROOT)]
        answers[version] = subprocess.check_output(command, env=environment, text=True)
    assert len(set(answers.values())) == 1, answers


PYPROJECT = """
[tool.setuptools]
package-dir = { shop_server = "server" }
packages = ["shop", "shop.deep", "shop_server"]
[tool.pytest.ini_options]
pythonpath = ["tests/helpers"]
markers = ["gpu", "quick", "alone"]
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "shop/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from shop.deep.late import Late as Late
    from shop.types_alone import Kind
def __getattr__(name): ...
""",
    "shop/base.py": "x = 1",
    "shop/other.py": "def f():\n    from shop import base",
    "shop/types_alone.py": "x = 1",
    "shop/deep/__init__.py": "",
    "shop/deep/late.py": "from ..base import x",
    "shop/deep/unused.py": "x = 1",
    "server/__init__.py": "",
    "server/app.py": "from . import pages",
    "server/pages.py": "x = 1",
    "tests/helpers/helper.py": "import shop.other",
    "tests/shop/test_lazy.py": "import pytest\nfrom shop import Late\n"
    "@pytest.mark.gpu\ndef test_a(): ...",
    "tests/shop/test_cpu.py": "import shop.deep.unused",
    "tests/helped/test_helped.py": "import pytest, helper\npytestmark = pytest.mark.gpu",
    "tests/shop/deep/test_deep.py": "import pytest\npytestmark = [pytest.mark.gpu]",
    "tests/server/test_run.py": "import pytest\nP = 'import shop_server.app as a'\n"
    "pytestmark = pytest.mark.gpu",
    "tests/server/test_text.py": "'pytest.mark.gpu'",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a package that resolves its names when they are used, and one whose folder has
    another name."""
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def covered(project: Path, folder: str) -> set[str]:
    return {path.relative_to(project).as_posix() for path in Sources(project).covered(folder)}


def test_folders_with_gpu_tests_are_found_by_the_marker_in_code_alone(project: Path) -> None:
    found = {
        folder: [path.name for path in paths]
        for folder, paths in Sources(project).marked_tests.items()
    }
    assert found == {
        "tests/helped": ["test_helped.py"],
        "tests/server": ["test_run.py"],
        "tests/shop": ["test_lazy.py"],
        "tests/shop/deep": ["test_deep.py"],
    }


def test_a_folder_covers_what_its_gpu_tests_import_also_where_a_package_resolves_a_name_late(
    project: Path,
) -> None:
    """Neither the modules for annotations nor the imports of tests without a GPU count."""
    files = {
        "tests/shop/test_lazy.py",
        "shop/__init__.py",
        "shop/deep/__init__.py",
        "shop/deep/late.py",
        "shop/base.py",
    }
    assert covered(project, "tests/shop") == files


def test_a_folder_covers_the_subpackage_of_its_path(project: Path) -> None:
    inside = {
        "shop/__init__.py",
        *(f"shop/deep/{name}.py" for name in ("__init__", "late", "unused")),
    }
    assert covered(project, "tests/shop/deep") == {
        "tests/shop/deep/test_deep.py",
        "shop/base.py",
        *inside,
    }


def test_a_folder_covers_modules_that_its_tests_name_in_strings(project: Path) -> None:
    files = {"tests/server/test_run.py", "server/__init__.py", "server/app.py", "server/pages.py"}
    assert covered(project, "tests/server") == files


def test_a_folder_of_no_package_covers_all_of_them_and_its_helpers(project: Path) -> None:
    packages = {name for name in FILES if name.startswith(("shop/", "server/"))}
    assert covered(project, "tests/helped") == {
        "tests/helped/test_helped.py",
        "tests/helpers/helper.py",
        *packages,
    }


def test_a_use_of_a_packages_name_is_an_import_of_it(project: Path) -> None:
    test = project / "tests" / "shop" / "test_lazy.py"
    test.write_text("import pytest, shop\npytestmark = pytest.mark.gpu\ndef test_a(): shop.Late()")
    assert "shop/deep/late.py" in covered(project, "tests/shop")
    test.write_text("import pytest, shop\npytestmark = pytest.mark.gpu\ndef test_a(): shop.other()")
    assert {"shop/other.py", "shop/base.py"} <= covered(project, "tests/shop")


def test_a_change_in_the_executor_concerns_its_own_folders_and_not_that_of_devices() -> None:
    sources = Sources(ROOT)
    executor = ROOT / "placer" / "executor" / "dataflow.py"
    concerned = {folder for folder in sources.marked_tests if executor in sources.covered(folder)}
    assert {
        "tests/placer/executor",
        "tests/placer/executor/training",
        "tests/end_to_end",
    } <= concerned
    assert not {"tests/placer/devices", "tests/placer/capture"} & concerned


def entry(sources: Sources, folder: str, **changes: Any) -> gpu_record.Entry:
    made = {"run": "full", "gpu_count": 2, "gpus": ["GPU"] * 2, "failed": 0}
    return {**made, **run_record.code(folder, sources), **changes}


@pytest.fixture
def recorded(project: Path) -> Path:
    """The project with a record of the present code."""
    sources = Sources(project)
    for folder in sources.marked_tests:
        gpu_record.add(project, folder, entry(sources, folder))
    return project


def outdated(project: Path) -> list[str]:
    return gpu_record.outdated(gpu_record.read(project), Sources(project))


def test_a_record_of_the_present_code_has_no_faults(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outdated(recorded) == []
    monkeypatch.setattr(
        Sources, "hash_of", lambda *_: pytest.fail("files were parsed, and none has changed")
    )
    assert outdated(recorded) == []


def test_a_comment_leaves_a_record_valid_and_a_change_does_not(recorded: Path) -> None:
    file = recorded / "shop" / "deep" / "unused.py"
    file.write_text('"""Unused."""\nx = (\n    1  # as ever\n)')
    assert outdated(recorded) == []
    file.write_text("x = 2")
    told = "the full run on 2 GPUs belongs to other code"
    assert outdated(recorded) == [f"tests/helped: {told}", f"tests/shop/deep: {told}"]


def test_a_gpu_test_that_was_never_run_makes_a_record_outdated(recorded: Path) -> None:
    (recorded / "tests" / "shop" / "test_new.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu"
    )
    assert outdated(recorded) == ["tests/shop: the full run on 2 GPUs belongs to other code"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": 1}, ["tests/shop: the full run on 2 GPUs has 1 failure"]),
        ({"failed": 2, "gpu_count": 4}, ["tests/shop: the full run on 4 GPUs has 2 failures"]),
        (
            {"hash": "of old", "gpu_count": 4},
            ["tests/shop: the full run on 4 GPUs belongs to other code"],
        ),
        (
            {"hash": "of old", "run": "quick"},
            ["tests/shop: the quick run on 2 GPUs belongs to other code"],
        ),
        ({"run": "quick"}, []),
    ],
)
def test_every_run_of_a_record_counts(
    recorded: Path, changes: dict[str, Any], said: list[str]
) -> None:
    gpu_record.add(recorded, "tests/shop", entry(Sources(recorded), "tests/shop", **changes))
    assert outdated(recorded) == said


def test_one_gpu_and_a_quick_run_are_not_enough(project: Path) -> None:
    sources = Sources(project)
    gpu_record.add(project, "tests/shop", entry(sources, "tests/shop", gpu_count=1))
    gpu_record.add(project, "tests/shop", entry(sources, "tests/shop", run="quick"))
    assert "tests/shop: no full run on 2 or more GPUs" in outdated(project)


def test_a_folder_that_is_gone_is_named(recorded: Path) -> None:
    shutil.rmtree(recorded / "tests" / "shop" / "deep")
    assert outdated(recorded) == [
        "tests/shop/deep: has a record, but no GPU tests; remove it from tests/gpu-record.json"
    ]


def test_runs_of_both_kinds_and_of_every_number_of_gpus_stand_side_by_side(recorded: Path) -> None:
    sources = Sources(recorded)
    for changes in (
        {"run": "quick"},
        {"gpu_count": 4},
        {"run": "quick", "gpu_count": 4},
        {"passed": 3},
    ):
        gpu_record.add(recorded, "tests/shop", entry(sources, "tests/shop", **changes))
    kept = [
        (item["run"], item["gpu_count"], item.get("passed"))
        for item in gpu_record.read(recorded)["tests/shop"]
    ]
    assert kept == [("full", 2, 3), ("full", 4, None), ("quick", 2, None), ("quick", 4, None)]


def test_a_full_run_takes_the_place_of_a_quick_one_of_other_code(recorded: Path) -> None:
    sources = Sources(recorded)
    gpu_record.add(recorded, "tests/shop", entry(sources, "tests/shop", run="quick", hash="of old"))
    gpu_record.add(recorded, "tests/shop", entry(sources, "tests/shop"))
    assert outdated(recorded) == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that runs and checks, on a machine with two pretended GPUs."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    # of the process that runs this test
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # Importing all other plugins takes half of the time of so small a run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    program = importlib.import_module("gpu")
    facts = {"gpu_count": 2, "gpus": ["H100", "H100"], "python": "3", "torch": "2", "cuda": "13"}
    monkeypatch.setattr(program, "_facts", lambda: facts)
    return program


OUTCOMES = """
import os, pytest
pytestmark = pytest.mark.gpu
@pytest.mark.quick
def test_passes(): ...
def test_fails(): assert 1 == 2, "one is not two"
def test_is_skipped(): pytest.skip("why")
@pytest.mark.alone
def test_alone(): assert os.environ.get("PYTEST_XDIST_WORKER") is None
@pytest.fixture
def broken(): raise ValueError("no luck")
def test_errs(broken): ...
"""


def test_a_run_counts_what_became_of_the_tests_and_names_the_failures(
    project: Path, gpu: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "tests" / "shop" / "test_lazy.py").write_text(OUTCOMES)
    sources = Sources(project)
    assert gpu.run(sources, {"tests/shop": sources.marked_tests["tests/shop"]}, False, 2) == 1
    (found,) = gpu_record.read(project)["tests/shop"]
    assert (found["passed"], found["failed"], found["skipped"], found["gpu_count"]) == (2, 2, 1, 2)
    assert (
        found["hash"] == sources.hash_of("tests/shop")
        and found["seconds"] > 0
        and found["torch"] == "2"
    )
    said = capfd.readouterr().out
    assert (
        "test_fails: AssertionError: one is not two" in said
        and "test_errs: failed on setup" in said
    )
    assert said.splitlines()[-1].split()[:4] == ["tests/shop", "2", "2", "1"]


def test_a_quick_run_selects_its_tests_and_has_an_entry_of_its_own(project: Path, gpu: Any) -> None:
    (project / "tests" / "shop" / "test_lazy.py").write_text(OUTCOMES)
    sources = Sources(project)
    assert gpu.run(sources, sources.tests_with("quick"), True, 1) == 0
    assert {
        folder: [item["run"] for item in found]
        for folder, found in gpu_record.read(project).items()
    } == {"tests/shop": ["quick"]}
    assert gpu_record.read(project)["tests/shop"][0]["passed"] == 1


def test_a_process_that_crashes_is_a_failure(project: Path, gpu: Any) -> None:
    (project / "tests" / "shop" / "test_lazy.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\ndef test_a(): os.abort()"
    )
    sources = Sources(project)
    assert gpu.run(sources, {"tests/shop": sources.marked_tests["tests/shop"]}, False, 1) == 1
    assert gpu_record.read(project)["tests/shop"][0]["failed"] == 1


def test_without_a_gpu_nothing_is_run_or_recorded(
    project: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_facts", lambda: {"gpu_count": 0, "gpus": []})
    sources = Sources(project)
    assert gpu.run(sources, sources.marked_tests, False, 1) == 2
    assert gpu_record.read(project) == {}


def _checked(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(ROOT / "tests" / "gpu.py"), "--check"]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_the_check_of_this_project_needs_no_installed_package_and_takes_under_two_seconds() -> None:
    seconds: list[float] = []
    # Other processes may have the processors meanwhile.
    while len(seconds) < 3 and not any(time < 2 for time in seconds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
        answer = _checked("-S")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert answer.returncode in (0, 1) and answer.stderr == "", answer.stderr
        assert bool(answer.returncode) == bool(answer.stdout)
        worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append(min(perf_counter() - began, worked))
    assert min(seconds) < 2


def test_a_folder_without_gpu_tests_is_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu.py"), "tests/client"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert (
        "'tests/client' has no GPU tests; folders that have some: tests/benchmarks, "
        in answer.stderr
    )
