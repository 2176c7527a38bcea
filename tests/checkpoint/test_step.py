"""One step, written and read by one process; distributed/test_checkpoint_ranks.py has two."""

import os

import pytest
import torch

from veofunc.checkpoint.manifest import CheckpointError, read_complete
from veofunc.checkpoint.step import Ranks, explain, read_step, write_step

LEAVES = {("model", "a.b"): torch.arange(3.0), ("rng", "x"): torch.ones(1), ("step",): 4}


def test_a_step_is_read_as_it_was_written(tmp_path):
    path = write_step(tmp_path, 4, LEAVES, Ranks())
    read = read_step(path, {}, Ranks(), strict=True)
    assert read.keys() == LEAVES.keys()
    assert read["step",] == 4
    assert torch.equal(read["model", "a.b"], torch.arange(3.0))


def test_the_manifest_lists_every_file_and_what_wrote_them(tmp_path):
    path = write_step(tmp_path, 4, LEAVES, Ranks())
    manifest = read_complete(path)
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {*manifest.files, "manifest.json"}
    assert manifest.slots == ("model", "rest")
    assert manifest.versions["torch"] == torch.__version__
    assert "veofunc" in manifest.versions


def test_what_kept_a_rank_from_staging_fails_the_step(tmp_path):
    with pytest.raises(CheckpointError, match="rank 0, staging the state: no"):
        write_step(tmp_path, 4, CheckpointError("no"), Ranks())
    assert os.listdir(tmp_path) == []


def test_an_error_is_explained_with_what_came_before():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected pos") from error
    except RuntimeError as error:
        text = explain(error)
    assert text == "RuntimeError: unexpected pos (after OSError: [Errno 28] No space left on device)"
    assert explain(CheckpointError("ours")) == "ours"
