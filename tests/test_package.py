"""What the installed package promises: quick to import, typed, documented, with pins that fit."""

import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import veofunc

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Every child starts where torch and tensordict are loaded and nothing else is: its import is a first one.
FIRST_IMPORTS = """
import os, sys, time
import tensordict, torch
for _ in range(5):
    if os.fork() == 0:
        start = time.process_time()
        import veofunc
        print(time.process_time() - start, flush=True)
        os._exit(0)
    os.wait()
"""


def run_python(source: str) -> str:
    command = [sys.executable, "-c", source]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def test_import_adds_at_most_three_tenths_of_a_second_to_torch_and_tensordict():
    seconds = [float(line) for line in run_python(FIRST_IMPORTS).split()]
    assert len(seconds) == 5
    assert min(seconds) <= 0.3, seconds


def test_import_loads_no_package_that_only_some_calls_need():
    source = "import tensordict, torch, sys; before = set(sys.modules); import veofunc; "
    added = run_python(source + "print(*set(sys.modules) - before)").split()
    assert "veofunc" in added
    assert {"matplotlib", "wandb", "transformers", "tqdm"}.isdisjoint(added)


def test_all_holds_every_name_once():
    assert len(set(veofunc.__all__)) == len(veofunc.__all__)


FUNCTIONS = [name for name in veofunc.__all__ if inspect.isfunction(getattr(veofunc, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_says_what_it_takes_returns_and_raises_and_shows_it(name):
    function = getattr(veofunc, name)
    parts = ["Args:", "Raises:", ">>> "]
    if inspect.signature(function).return_annotation not in (None, "None"):
        parts.append("Returns:")
    assert [part for part in parts if part not in (function.__doc__ or "")] == []


@pytest.mark.parametrize("name", sorted(set(veofunc.__all__) - set(FUNCTIONS)))
def test_public_class_or_module_has_a_docstring_of_its_own(name):
    doc = getattr(veofunc, name).__doc__ or ""
    assert doc and not doc.startswith(f"{name}(")  # what dataclasses and named tuples write by themselves


def test_wheel_holds_every_module_and_the_marker_of_typed_packages(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "veofunc").rglob("*.py")}
    assert held == sources | {"veofunc/py.typed"}


def test_constraints_pin_one_version_of_each_dependency_within_its_range():
    pins = constraints()
    for requirement in requirements("dev", "docs", "interop"):
        pin = pins[canonicalize_name(requirement.name)]
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), (str(requirement), str(pin))


def test_constraints_fit_any_build_of_torch():
    (specifier,) = constraints()["torch"].specifier
    assert re.fullmatch(r"\d+\.\d+\.\d+", specifier.version)
