"""Every example that a reader may copy runs: README.md, docs/**/*.md, and `>>>` in docstrings.

Nothing is prepared for them. A page's blocks share one namespace, in order, as a reader would type
them; every docstring starts from an empty one, so it imports what it uses.
"""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import veofunc

ROOT = Path(__file__).parents[1]


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "```python" in path.read_text() and "_build" not in path.parts:
            yield path


def docstrings() -> Iterator[doctest.DocTest]:
    names = [m.name for m in pkgutil.walk_packages(veofunc.__path__, "veofunc.")]
    for name in ["veofunc", *names]:
        finder = doctest.DocTestFinder(exclude_empty=True)
        for test in finder.find(importlib.import_module(name), name, globs={}):
            if test.examples:
                yield test


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_runs(path):
    document = Document.parse(str(path), PythonCodeBlockParser())
    examples = list(document.examples())
    assert len(examples) == len(re.findall(r"^ *```python", document.text, re.MULTILINE))
    for example in examples:
        example.evaluate()


@pytest.mark.parametrize("name", veofunc.__all__)
def test_public_name_stands_on_the_api_page(name):
    value = getattr(veofunc, name)
    if inspect.ismodule(value):
        directive = rf"automodule:: {value.__name__}"
    else:
        directive = rf"auto(function|class):: {name}"
    assert re.search(rf"^\.\. {directive}$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("test", list(docstrings()), ids=lambda test: test.name)
def test_docstring_runs(test):
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
