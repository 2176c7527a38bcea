import json
import os
import zlib

import pytest

from veofunc.checkpoint.manifest import (
    CheckpointError,
    Entry,
    Manifest,
    commit,
    damage,
    describe_file,
    read_complete,
    remove_abandoned,
    remove_step,
    step_numbers,
    temporary_step,
    verify_files,
)

ENTRIES = (
    Entry(("model", "a.b"), "tensor", None, "model", "a.b", (2, 3), "bfloat16"),
    Entry(("rng", "torch"), "tensor", 0, "rest", "rank_0.rng.torch", (), "uint8"),
    Entry(("step",), "json", value=0),
    Entry(("best",), "json", value=[float("inf"), None, "ä\n", {"x": 1e-300}]),
    Entry(("none",), "json"),
    Entry(("optimizer", "state"), "empty"),
)


DEEP = b"[" * 900 + b"]" * 900
DEEPER = b"[" * 100_000


@pytest.fixture
def step(tmp_path):
    """A committed step 5 of one file of 10 bytes."""
    with temporary_step(tmp_path, 5) as unfinished:
        (unfinished / "model").mkdir()
        (unfinished / "model" / "data").write_bytes(b"0123456789")
        files = {"model/data": describe_file(unfinished / "model" / "data")}
        manifest = Manifest(5, 2, ("model",), {"torch": "2"}, files, ENTRIES)
        commit(unfinished, tmp_path / "step_5", manifest)
    return tmp_path / "step_5"


def rewrite(path, **changes):
    body = {**json.loads(path.read_text()), **changes}
    del body["crc32"]
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps(body))


def test_a_manifest_comes_back_as_it_was_written(step):
    manifest = read_complete(step)
    assert manifest.entries == ENTRIES
    assert (manifest.step, manifest.world_size, manifest.slots) == (5, 2, ("model",))
    assert manifest.files["model/data"].size == 10
    assert manifest.files["model/data"].crc32 == zlib.crc32(b"0123456789")


def test_commit_leaves_nothing_but_the_step(step):
    assert os.listdir(step.parent) == ["step_5"]
    assert sorted(os.listdir(step)) == ["manifest.json", "model"]


def test_a_step_is_as_readable_as_other_directories(step):
    step.with_name("other").mkdir()
    assert step.stat().st_mode == step.with_name("other").stat().st_mode


def test_what_is_not_committed_is_removed(tmp_path):
    with pytest.raises(KeyError), temporary_step(tmp_path, 5) as unfinished:
        (unfinished / "data").write_bytes(b"1")
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_commit_does_not_replace_a_step(step):
    with (
        pytest.raises(OSError, match="not empty"),
        temporary_step(step.parent, 5) as unfinished,
    ):
        commit(unfinished, step, Manifest(5, 1, (), {}, {}, ()))
    assert read_complete(step).entries == ENTRIES


def test_an_unfinished_step_is_no_step_and_is_removed_once_its_writer_is_gone(tmp_path, caplog):
    abandoned = tmp_path / ".unfinished-step_3-abc"
    (abandoned / "model").mkdir(parents=True)
    (tmp_path / ".unfinished-file").write_text("not a directory")
    with temporary_step(tmp_path, 4) as living:
        assert step_numbers(tmp_path) == []
        remove_abandoned(tmp_path)
        assert living.exists()
    assert not abandoned.exists()
    assert str(abandoned) in caplog.text


def test_steps_are_whole_names_with_plain_numbers_in_numeric_order(tmp_path):
    names = ["step_10", "step_9", "step_0", "step_01", "step_1x", "xstep_1", "step_٣", "step_"]
    for name in names:
        (tmp_path / name).mkdir()
    assert step_numbers(tmp_path) == [0, 9, 10]


def test_a_removed_step_is_gone(step):
    remove_step(step)
    assert os.listdir(step.parent) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "No such file"), (b"0123", "has 4 bytes, must have 10")],
    ids=["missing", "short"],
)
def test_a_missing_or_short_file_makes_a_step_incomplete(step, content, text):
    file = step / "model" / "data"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert str(file) in damage(step)
    assert text in damage(step)
    with pytest.raises(CheckpointError, match=text):
        read_complete(step)


def test_verifying_finds_a_changed_byte_that_the_size_does_not_show(step):
    (step / "model" / "data").write_bytes(b"0123456780")
    assert damage(step) == ""
    manifest = read_complete(step)
    with pytest.raises(CheckpointError, match=r"model/data: its CRC-32 is [0-9a-f]{8}, must be"):
        verify_files(step, manifest, ["model/data"])
    verify_files(step, manifest, [])


def test_a_step_without_a_manifest_is_unfinished(step):
    (step / "manifest.json").unlink()
    assert "the save was not finished" in damage(step)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff", DEEP, DEEPER])
def test_a_manifest_that_is_none_is_damaged(step, content):
    (step / "manifest.json").write_bytes(content)
    assert "manifest.json" in damage(step)


def test_a_value_changed_in_the_manifest_is_found(step):
    file = step / "manifest.json"
    file.write_text(file.read_text().replace('"world_size": 2', '"world_size": 3'))
    assert "differs from its checksum" in damage(step)


def test_a_manifest_of_another_format_or_step_is_refused(step):
    rewrite(step / "manifest.json", format=2, versions={"veofunc": "9"})
    assert "another veofunc, {'veofunc': '9'}" in damage(step)
    rewrite(step / "manifest.json", format=1, step=6)
    assert "is of step 6" in damage(step)


def test_a_checksum_covers_every_piece_of_a_large_file(tmp_path):
    content = bytes(range(256)) * (1 << 16)
    (tmp_path / "large").write_bytes(content)
    record = describe_file(tmp_path / "large")
    assert (record.size, record.crc32) == (len(content), zlib.crc32(content))
