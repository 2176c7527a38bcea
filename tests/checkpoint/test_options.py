"""Each wrong option is named, with its value and what it must be."""

import pytest
import torch

from tests.checkpoint.support import state_of
from veofunc.checkpoint import async_checkpointer
from veofunc.checkpoint.options import Options

DEFAULTS = {
    "slots": None,
    "per_rank": ("rng",),
    "keep": (None, None, None),
    "copy": True,
    "double_buffer": False,
    "files_per_rank": 1,
    "bytes_per_second": None,
    "timeout": 300.0,
}

WRONG = {
    "copy=1": ({"copy": 1}, TypeError, "copy must be True or False, got 1"),
    "double_buffer=None": (
        {"double_buffer": None},
        TypeError,
        "double_buffer must be True or False, got None",
    ),
    "files_per_rank=1.0": ({"files_per_rank": 1.0}, TypeError, "files_per_rank must be an int, got 1.0"),
    "files_per_rank=True": ({"files_per_rank": True}, TypeError, "files_per_rank must be an int, got True"),
    "files_per_rank=0": ({"files_per_rank": 0}, ValueError, "files_per_rank must be from 1 to 64, got 0"),
    "files_per_rank=65": ({"files_per_rank": 65}, ValueError, "files_per_rank must be from 1 to 64, got 65"),
    "bytes_per_second='1'": (
        {"bytes_per_second": "1"},
        TypeError,
        "bytes_per_second must be a number or None, got '1'",
    ),
    "bytes_per_second=0": ({"bytes_per_second": 0}, ValueError, "bytes_per_second must be above 0.*got 0"),
    "timeout=None": ({"timeout": None}, TypeError, "timeout must be a number, got None"),
    "timeout=True": ({"timeout": True}, TypeError, "timeout must be a number, got True"),
    "timeout=-1": ({"timeout": -1}, ValueError, "timeout must be above 0 and finite, got -1"),
    "timeout=inf": ({"timeout": float("inf")}, ValueError, "timeout must be above 0 and finite, got inf"),
    "timeout=nan": ({"timeout": float("nan")}, ValueError, "timeout must be above 0 and finite, got nan"),
    "per_rank='rng'": (
        {"per_rank": "rng"},
        TypeError,
        "per_rank must be a list or tuple of top-level keys, got 'rng'",
    ),
    "per_rank=1": ({"per_rank": 1}, TypeError, "per_rank must be a list or tuple of top-level keys, got 1"),
    "per_rank=[1]": (
        {"per_rank": [1]},
        TypeError,
        r"per_rank must hold top-level keys, which are str, got \[1\]",
    ),
    "slots=list": ({"slots": ["ema"]}, TypeError, r"slots must be a mapping as .*got \['ema'\]"),
    "a slot of a str": (
        {"slots": {"ema": "ema"}},
        TypeError,
        r"slots\['ema'\] must be a list or tuple.*got 'ema'",
    ),
    "a slot above": ({"slots": {"../ema": ["ema"]}}, ValueError, "must do for a directory.*got '../ema'"),
    "a hidden slot": ({"slots": {".ema": ["ema"]}}, ValueError, "must do for a directory.*got '.ema'"),
    "a slot without name": ({"slots": {"": ["ema"]}}, ValueError, "must do for a directory.*got ''"),
    "a slot that is no str": ({"slots": {1: ["ema"]}}, ValueError, "must do for a directory.*got 1"),
    "a key in two slots": (
        {"slots": {"a": ["x", "y"], "b": ["y"]}},
        ValueError,
        "slots must have each key once; 'y' is in 'a' and in 'b'",
    ),
}


@pytest.mark.parametrize(("options", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_named_with_its_value(options, kind, text):
    Options.of(**DEFAULTS)
    with pytest.raises(kind, match=text):
        Options.of(**{**DEFAULTS, **options})


def test_a_wrong_option_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="timeout must be above 0"):
        async_checkpointer(state_of(0), tmp_path / "new", timeout=0)
    assert not (tmp_path / "new").exists()


def test_every_key_is_in_its_slot_and_the_others_share_rest():
    sections = Options.of(
        **{**DEFAULTS, "slots": {"big": ["model", "ema"]}, "per_rank": ["sampler"]}
    ).sections
    found = {key: sections.slot_of((key, "x")) for key in ("model", "ema", "optimizer", "step")}
    assert found == {"model": "big", "ema": "big", "optimizer": "rest", "step": "rest"}
    assert sections.per_rank == {"rng", "window", "loader", "sampler"}
    sections = Options.of(**DEFAULTS).sections
    found = {key: sections.slot_of((key,)) for key in ("model", "optimizer", "ema")}
    assert found == {"model": "model", "optimizer": "optimizer", "ema": "rest"}


@pytest.mark.parametrize("double_buffer", [False, True])
def test_double_buffer_is_twice_the_memory(double_buffer):
    assert Options.of(**{**DEFAULTS, "double_buffer": double_buffer}).num_buffers == 1 + double_buffer


RESTORE = {
    "verify='crc'": ({"verify": "crc"}, ValueError, 'verify must be "full" or "sizes", got \'crc\''),
    "ranks='mine'": ({"ranks": "mine"}, ValueError, 'ranks must be "own", "drop" or "all", got \'mine\''),
    "only='model'": (
        {"only": "model"},
        TypeError,
        "only must be a list or tuple of top-level keys, got 'model'",
    ),
    "only=[1]": ({"only": [1]}, TypeError, r"only must hold top-level keys, which are str, got \[1\]"),
    "map_location='disk:x'": ({"map_location": "disk:x"}, ValueError, "map_location must be .*got 'disk:x'"),
    "map_location='meta'": ({"map_location": "meta"}, ValueError, "map_location must be .*got 'meta'"),
}


@pytest.mark.parametrize(("options", "kind", "text"), RESTORE.values(), ids=RESTORE)
def test_a_wrong_option_of_restore_is_named_with_its_value(options, kind, text, tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
    with pytest.raises(kind, match=text):
        ckpt.restore(state_of(0), **options)


SAVE = {
    "metrics=1": ({"metrics": 1}, 'metrics must be a mapping as {"loss": 1.2}, got 1'),
    "a tensor": (
        {"metrics": {"loss": torch.ones(())}},
        "metrics must be numbers by their names, got 'loss': tensor",
    ),
    "a name that is no str": ({"metrics": {1: 2.0}}, "metrics must be numbers by their names, got 1: 2.0"),
    "True": ({"metrics": {"ok": True}}, "metrics must be numbers by their names, got 'ok': True"),
}


@pytest.mark.parametrize(("options", "text"), SAVE.values(), ids=SAVE)
def test_a_wrong_option_of_save_is_named_with_its_value(options, text, tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        with pytest.raises(TypeError, match=text):
            ckpt.save(state_of(1), 1, **options)
        assert ckpt.steps() == ()


@pytest.mark.parametrize(
    ("directory", "kind", "text"),
    [
        (3, TypeError, "directory must be a path or a URL, got 3"),
        (__file__, NotADirectoryError, "test_options.py is a file"),
        (f"file://{__file__}", NotADirectoryError, "test_options.py is a file"),
        ("nosuch://bucket/run", ValueError, "nosuch"),
    ],
)
def test_a_wrong_directory_is_named(directory, kind, text):
    with pytest.raises(kind, match=text):
        async_checkpointer(state_of(0), directory)
