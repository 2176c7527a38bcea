"""Sinks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import veofunc as vf
from tests.limits import largest_file

METRICS = {"channel_loss/python": 2.3125, "channel_loss/cpp": 1.5, "moe/max_vio/max": 0.25}


class TestTerminal:
    def test_prints_all_metrics_on_one_line(self, capsys):
        vf.log.terminal()(METRICS, 7)
        printed = capsys.readouterr().out
        assert printed == (
            "step 7 | channel_loss/python 2.312 | channel_loss/cpp 1.5 | moe/max_vio/max 0.25\n"
        )

    def test_prints_chosen_metrics_in_the_chosen_order(self):
        lines = []
        vf.log.terminal("moe/", "channel_loss/cpp", write=lines.append)(METRICS, 7)
        assert lines == ["step 7 | moe/max_vio/max 0.25 | channel_loss/cpp 1.5"]


class TestJsonLines:
    def test_appends_one_line_per_call(self, tmp_path):
        path = tmp_path / "new" / "metrics.jsonl"
        log = vf.log.json_lines(path)
        log(METRICS, 1)
        log({"loss": 2.0}, 2)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 1, **METRICS},
            {"step": 2, "loss": 2.0},
        ]

    def test_writes_strict_json(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        vf.log.json_lines(path)({"a": math.nan, "b": math.inf, "c": 1.0}, 1)

        def refuse(constant):
            raise AssertionError(constant)

        assert json.loads(path.read_text(), parse_constant=refuse) == {
            "step": 1,
            "a": None,
            "b": None,
            "c": 1.0,
        }

    def test_resume_removes_later_lines_and_an_unfinished_one(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        for step in (1, 2, 3):
            vf.log.json_lines(path)({"loss": float(step)}, step)
        with path.open("a") as file:
            file.write('{"step": 4, "lo')
        vf.log.json_lines(path, resume_step=2)({"loss": 30.0}, 3)
        steps = [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]
        assert steps == [(1, 1.0), (2, 2.0), (3, 30.0)]
        assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_resume_before_the_first_line_removes_all(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        vf.log.json_lines(path)({"loss": 1.0}, 1)
        vf.log.json_lines(path, resume_step=0)
        assert path.read_text() == ""

    def test_a_whole_last_line_without_its_newline_is_kept(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 1.0}')
        vf.log.json_lines(path, resume_step=1)({"loss": 2.0}, 2)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]

    def test_after_an_unfinished_line_a_new_one_begins(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
        vf.log.json_lines(path)({"loss": 3.0}, 3)
        vf.log.json_lines(path, resume_step=3)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]

    def test_of_a_line_that_cannot_be_written_nothing_is_left(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        log = vf.log.json_lines(path)
        log({"a": 1.0}, 1)
        with largest_file(30), pytest.raises(OSError, match="File too large"):
            log({"a": 2.0}, 2)
        log({"a": 3.0}, 3)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]

    def test_resume_keeps_a_link_and_the_mode(self, tmp_path):
        path, link = tmp_path / "metrics.jsonl", tmp_path / "link"
        path.write_text('{"step": 1}\n{"step": 9}\n')
        path.chmod(0o640)
        link.symlink_to(path)
        vf.log.json_lines(link, resume_step=5)({"loss": 6.0}, np.int64(6))
        assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 6]

    @pytest.mark.parametrize("step", [None, "x", 1.5])
    def test_a_step_must_be_an_int(self, tmp_path, step):
        with pytest.raises(TypeError):
            vf.log.json_lines(tmp_path / "metrics.jsonl")({"loss": 1.0}, step)

    @pytest.mark.parametrize("line", ['{"step": "x"}\n', '{"step": null}\n'])
    def test_resume_refuses_a_step_that_is_no_number(self, tmp_path, line):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"loss": 1}\n' + line)
        with pytest.raises(ValueError, match="line 1, is not a line of metrics"):
            vf.log.json_lines(path, resume_step=3)

    def test_takes_every_kind_of_number(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        vf.log.json_lines(path)({"a": torch.tensor(1.5), "b": np.float32(2.5), "c": 3}, 1)
        assert json.loads(path.read_text()) == {"step": 1, "a": 1.5, "b": 2.5, "c": 3.0}

    @pytest.mark.parametrize(
        ("metrics", "message"),
        [
            ({"a": "text"}, "metric 'a' must be a number, got 'text'"),
            ({"a": torch.ones(2)}, "metric 'a' must be a number"),
            ({"step": 5}, "a metric may not be called 'step'"),
        ],
    )
    def test_refuses_what_is_no_metric(self, tmp_path, metrics, message):
        path = tmp_path / "metrics.jsonl"
        with pytest.raises(ValueError, match=message):
            vf.log.json_lines(path)(metrics, 1)
        assert not path.exists()

    def test_without_resume_nothing_is_removed(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text("my own notes\n")
        vf.log.json_lines(path)({"loss": 1.0}, 1)
        assert path.read_text().startswith("my own notes\n")

    def test_resume_does_not_touch_a_file_that_is_not_ours(self, tmp_path):
        path = tmp_path / "notes.txt"
        for text in ("my own notes\nmore\n", "one line\n", "one line", "[1, 2]\n"):
            path.write_text(text)
            with pytest.raises(ValueError, match=r"notes.txt, line 1, is not a line of metrics"):
                vf.log.json_lines(path, resume_step=3)
            assert path.read_text() == text


class TestSeveral:
    def test_calls_all_in_order_with_figures(self):
        calls = []

        def sink(metrics, step, figures={}):  # noqa: B006
            calls.append((metrics, step, figures))

        vf.log.several(sink, sink)(METRICS, 3, figures={"a": "figure"})
        assert calls == [(METRICS, 3, {"a": "figure"})] * 2

    def test_refuses_what_is_no_sink(self):
        with pytest.raises(TypeError, match="a sink must be a function"):
            vf.log.several("metrics.jsonl")


class TestWandb:
    def test_is_offline_by_itself_without_a_key(self, tmp_path, monkeypatch):
        import wandb

        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
        log = vf.log.wandb(project="test", dir=tmp_path, settings=settings)
        figure = Figure()
        figure.add_subplot().imshow([[0, 1]])
        log(METRICS, 1, figures={"heatmap": figure})
        wandb.run.finish()
        (run,) = (tmp_path / "wandb").glob("offline-run-*")
        assert list(run.glob("*.wandb"))
        assert list(run.glob("files/media/images/heatmap*.png"))

    def test_takes_a_run_of_the_users_own(self):
        logged = []

        class Run:
            def log(self, values, step):
                logged.append((values, step))

        vf.log.wandb(Run())(METRICS, 4)
        assert logged == [(METRICS, 4)]

    def test_a_run_and_arguments_for_one_are_an_error(self):
        with pytest.raises(ValueError, match=r"not both; got run and \['project'\]"):
            vf.log.wandb(object(), project="test")
