"""The directory of a run: what claims it, and what is refused and left alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rundir

SETTINGS = {"seed": "0", "device": "cpu"}

HOLD_UNTIL_KILLED = """
import pathlib, rundir, subprocess, sys
with rundir.claim(pathlib.Path(sys.argv[1]), {"seed": "0", "device": "cpu"}):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def claim_once(out):
    with rundir.claim(out, SETTINGS):
        pass


def test_new_directory_gets_the_settings_and_is_known_again(tmp_path):
    out = tmp_path / "runs" / "mine"
    for _ in range(2):
        with rundir.claim(out, SETTINGS):
            assert json.loads((out / "run.json").read_text()) == SETTINGS
    assert len((out / "run.json").read_text().splitlines()) == 1


def test_run_killed_before_its_settings_were_written_goes_on(tmp_path):
    (tmp_path / "run.json").touch()
    with rundir.claim(tmp_path, SETTINGS):
        assert json.loads((tmp_path / "run.json").read_text()) == SETTINGS


def test_second_claim_is_refused_as_long_as_the_first_lives(tmp_path):
    message = "is in use by another run; wait for it or choose another --out"
    with rundir.claim(tmp_path, SETTINGS), pytest.raises(SystemExit, match=message):
        claim_once(tmp_path)
    claim_once(tmp_path)


def test_killed_process_leaves_no_lock_behind_even_if_its_children_live(tmp_path):
    command = [sys.executable, "-c", HOLD_UNTIL_KILLED, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(rundir.__file__).parent, **pipes) as holder:
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(SystemExit, match="in use"):
                claim_once(tmp_path)
            holder.kill()
            assert holder.wait() == -signal.SIGKILL
            claim_once(tmp_path)
        finally:
            subprocess.run(["kill", str(child)], check=True)


@pytest.mark.parametrize("below", [".", "run", "runs/mine"])
def test_file_in_the_way_is_refused_and_left_alone(below, tmp_path):
    file = tmp_path / "thesis.tex"
    file.write_text("mine")
    with pytest.raises(SystemExit, match=r"thesis.tex.* cannot hold a run: Not a directory; choose another"):
        claim_once(file / below)
    assert file.read_text() == "mine"


def test_directory_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="cannot hold a run: File name too long"):
        claim_once(tmp_path / ("x" * 300))


@pytest.mark.parametrize("content", [b"{", b"\n", b"\xff\xfe", b"[]", b"null", b'{"seed": "0"}'])
def test_damaged_settings_are_refused_and_left_alone(content, tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(SystemExit, match=r"run.json is damaged: it must hold seed, device; mend it or"):
        claim_once(tmp_path)
    assert file.read_bytes() == content
