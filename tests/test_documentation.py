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
import torch
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
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as dcp.load says of one process
def test_page_runs(path):
    document = Document.parse(str(path), PythonCodeBlockParser())
    examples = list(document.examples())
    assert len(examples) == len(re.findall(r"^ *```python", document.text, re.MULTILINE))
    for example in examples:
        example.evaluate()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("name, last_step", [("get_started", 20), ("async_checkpoints", 3)])
def test_loop_that_resumes_ends_with_the_same_bits(name, last_step, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / f"docs/{name}.md").read_text(), re.M | re.S)
    loop = next(index for index, block in enumerate(blocks) if "ckpt.latest() is not None" in block)

    def run(directory, *, seed, stop_at=None):
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        torch.manual_seed(seed)
        page, steps = {}, []
        before, at, rest = "\n".join(blocks[: loop + 1]).partition("\ntemplate = ")
        assert at
        exec(before, page)
        make_batch = page["make_batch"]

        def make_batch_or_stop(step):
            if step == stop_at:
                raise Stopped
            steps.append(step)
            return make_batch(step)

        page["make_batch"] = make_batch_or_stop
        exec(at + rest, page)
        return page, steps

    whole, _ = run(tmp_path / "whole", seed=0)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", seed=0, stop_at=last_step - 1)
    resumed, steps = run(tmp_path / "stopped", seed=1)
    again, no_steps = run(tmp_path / "stopped", seed=2)
    assert 1 < steps[0] < last_step and steps[-1] == last_step and no_steps == []
    for page in (resumed, again):
        assert all(page["model"].state_dict()[k].equal(v) for k, v in whole["model"].state_dict().items())


@pytest.mark.parametrize("name", veofunc.__all__)
def test_public_name_stands_on_the_api_page(name):
    value = getattr(veofunc, name)
    if inspect.ismodule(value):
        directive = rf"automodule:: {value.__name__}"
    else:
        directive = rf"auto(function|class|exception):: {name}"
    assert re.search(rf"^\.\. {directive}$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", ["policies", "packing"])
def test_public_names_of_a_module_stand_on_the_api_page(module):
    found = re.findall(
        rf"^\.\. (?:data:: |autofunction:: veofunc::){module}\.(\w+)$",
        (ROOT / "docs/api.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(found) == sorted(getattr(veofunc, module).__all__)


@pytest.mark.parametrize("test", list(docstrings()), ids=lambda test: test.name)
def test_docstring_runs(test):
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
