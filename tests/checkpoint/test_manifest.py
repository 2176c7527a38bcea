import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.support import flip
from veofunc.checkpoint.manifest import (
    CheckpointError,
    Entry,
    FileRecord,
    Manifest,
    check_step,
    damage,
    read_complete,
    read_file,
    step_numbers,
    to_bytes,
    verify_files,
)
from veofunc.checkpoint.storage import LocalStorage, open_storage

VALUES = (
    Entry(("step",), "json", value=0),
    Entry(("best",), "json", value=[float("inf"), None, "ä\n", {"x": 1e-300}]),
    Entry(("none",), "json"),
    Entry(("loader", "position"), "json", 1, value=[3]),
    Entry(("optimizer", "state"), "empty"),
)
CONTENT = b"0123456789"
FILES = {"model/data": FileRecord(10, zlib.crc32(CONTENT))}
MANIFEST = Manifest(5, 2, ("model",), {"torch": "2"}, 1e9 + 0.1, {"loss": 0.5}, FILES, VALUES)


@pytest.fixture
def storage(tmp_path) -> LocalStorage:
    """Has a complete step 5 of one file of 10 bytes."""
    (tmp_path / "step_5" / "model").mkdir(parents=True)
    (tmp_path / "step_5" / "model" / "data").write_bytes(CONTENT)
    (tmp_path / "step_5" / "manifest.json").write_bytes(to_bytes(MANIFEST))
    return LocalStorage(tmp_path)


@pytest.fixture
def step(storage, tmp_path):
    return tmp_path / "step_5"


def rewrite(path, **changes):
    """With other fields and the checksum of them."""
    body = {**json.loads(path.read_text()), **changes}
    del body["crc32"]
    text = json.dumps(body, indent=1).encode().removesuffix(b"\n}")
    path.write_bytes(text + b',\n "crc32": %d\n}' % zlib.crc32(text))


def test_a_manifest_comes_back_as_it_was_written(storage):
    assert read_complete(storage, 5) == MANIFEST


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.lists(JSON), st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers()))
def test_every_json_value_and_metric_comes_back(tmp_path_factory, values, metrics):
    path = tmp_path_factory.getbasetemp() / "json" / "step_5"
    path.mkdir(parents=True, exist_ok=True)
    entries = tuple(Entry((f"x{i}", "crc32"), "json", value=value) for i, value in enumerate(values))
    manifest = replace(MANIFEST, metrics=metrics, files={}, values=entries)
    (path / "manifest.json").write_bytes(to_bytes(manifest))
    read = read_complete(open_storage(path.parent), 5)
    assert read == manifest
    assert repr(read) == repr(manifest)  # also -0.0, True and 1.0


def test_a_manifest_is_json_that_anyone_can_read(step):
    body = json.loads((step / "manifest.json").read_text())
    assert body["files"]["model/data"] == {"size": 10, "crc32": zlib.crc32(CONTENT)}
    assert body["values"][0] == {"path": ["step"], "kind": "json", "value": 0}


def test_any_flipped_bit_of_a_manifest_is_found(storage, step):
    file = step / "manifest.json"
    for place in range(file.stat().st_size):
        for bit in (0, 5, 7):
            flip(file, place, bit)
            assert str(file) in damage(storage, 5), (place, bit)
            flip(file, place, bit)
    assert damage(storage, 5) == ""


def test_a_manifest_cut_short_or_made_longer_anywhere_is_found(storage, step):
    file = step / "manifest.json"
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place])
        assert "differs from its checksum" in damage(storage, 5), place
    for more in (b"\n", b" ", b"}", b"\0"):
        file.write_bytes(content + more)
        assert "differs from its checksum" in damage(storage, 5)
        file.write_bytes(more + content)
        assert "differs from its checksum" in damage(storage, 5)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_is_damaged(content, storage, step):
    (step / "manifest.json").write_bytes(content)
    assert "differs from its checksum" in damage(storage, 5)


def test_a_manifest_of_another_format_or_step_is_refused(storage, step):
    rewrite(step / "manifest.json")
    assert damage(storage, 5) == ""
    rewrite(step / "manifest.json", format=1, versions={"veofunc": "9"})
    assert "another veofunc, {'veofunc': '9'}" in damage(storage, 5)
    rewrite(step / "manifest.json", format=2, step=6)
    assert "is of step 6" in damage(storage, 5)


def test_a_step_without_a_manifest_is_unfinished(storage, step):
    (step / "manifest.json").unlink()
    assert "No such file or directory; the save was not finished" in damage(storage, 5)


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "No such file"), (b"0123", "has 4 bytes, must have 10"), (CONTENT + b"x", "has 11 bytes")],
    ids=["missing", "short", "long"],
)
def test_a_file_that_is_missing_or_has_another_size_makes_a_step_incomplete(content, text, storage, step):
    file = step / "model" / "data"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for work in (lambda: read_complete(storage, 5), lambda: verify_files(storage, MANIFEST, FILES)):
        with pytest.raises(CheckpointError, match=rf"{file}: .*{text}"):
            work()


def test_any_flipped_bit_of_a_file_is_found_when_it_is_verified_and_only_then(storage, step):
    record = FILES["model/data"]
    for place in range(record.size):
        flip(step / "model" / "data", place, bit=place % 8)
        assert damage(storage, 5) == ""
        for work in (
            lambda: verify_files(storage, MANIFEST, FILES),
            lambda: read_file(storage, "step_5/model/data", record),
        ):
            with pytest.raises(CheckpointError, match=r"model/data: its CRC-32 is [0-9a-f]{8}, must be"):
                work()
        verify_files(storage, MANIFEST, [])
        flip(step / "model" / "data", place, bit=place % 8)
    verify_files(storage, MANIFEST, FILES)
    assert read_file(storage, "step_5/model/data", record) == CONTENT


def test_a_checksum_covers_every_piece_of_a_large_file(storage, step):
    content = bytes(range(256)) * (1 << 16)
    (step / "model" / "data").write_bytes(content)
    large = {"model/data": FileRecord(len(content), zlib.crc32(content))}
    verify_files(storage, replace(MANIFEST, files=large), large)
    flip(step / "model" / "data", len(content) - 1)
    with pytest.raises(CheckpointError, match="CRC-32"):
        verify_files(storage, replace(MANIFEST, files=large), large)


def test_steps_are_whole_names_with_plain_numbers_in_numeric_order(tmp_path):
    names = [
        "step_10",
        "step_9",
        "step_0",
        "step_01",
        "step_1x",
        "xstep_1",
        "step_٣",
        "step_",
        "step_-1",
        "STEP_2",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    assert step_numbers(LocalStorage(tmp_path)) == [0, 9, 10]


@pytest.mark.parametrize(
    ("step", "kind"),
    [(True, TypeError), (1.0, TypeError), ("1", TypeError), (-1, ValueError), (2**63, ValueError)],
)
def test_what_cannot_be_the_number_of_a_step_is_refused(step, kind):
    check_step(0)
    check_step(2**63 - 1)
    with pytest.raises(kind, match="step must be"):
        check_step(step)


@pytest.mark.parametrize(
    "entry",
    [
        *VALUES,
        Entry(("model", "a.b"), "tensor", None, "model", "a.b", (2, 3), "bfloat16"),
        Entry(("rng", "torch"), "tensor", 0, "rest", "rank_0.rng.torch", (), "uint8"),
        Entry(("model", "tied"), "tensor", None, "model", "tied", (2, 3), "bfloat16", "a.b"),
    ],
    ids=lambda entry: ".".join(entry.path),
)
def test_an_entry_comes_back_through_json(entry):
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
