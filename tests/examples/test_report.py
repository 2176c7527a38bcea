"""What the example shows, against the metrics it shows."""

import io
import json
import re

import data
import pytest
import report
from matplotlib.figure import Figure
from tqdm import tqdm


def line(step, losses, **more):
    names = zip(data.CHANNELS, losses, strict=True)
    metrics = {f"channel_loss/{name}": loss for name, loss in names if loss != "absent"}
    tokens = {f"channel_tokens/{name}": 1000.0 for name in data.CHANNELS}
    rest = {"loss": 2.5, "moe/max_vio/max": 0.25, "tokens_per_second": 12_345.0}
    return {"step": step} | metrics | tokens | rest | more


@pytest.fixture
def history():
    first = line(10, [4.0, 3.0, 3.5, None])  # None is how a NaN comes back from a file
    middle = line(20, [3.0, 2.5, "absent", 2.0])
    return [first, middle, line(30, [2.0, 2.25, 3.0, 1.0], **{"moe/max_vio/max": 0.0})]


def test_table_compares_the_first_window_with_the_last(history, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in history))
    lines = [text.split() for text in report.table(tmp_path).splitlines()]
    assert lines[1][-5:] == ["step", "10", "step", "30", "tokens"]
    assert lines[2:7] == [
        ["python", "4.000", "2.000", "3,000"],
        ["cpp", "3.000", "2.250", "3,000"],
        ["manual", "3.500", "3.000", "3,000"],
        ["legal", "nan", "1.000", "3,000"],
        ["router", "max", "violation", "0.250", "0.000"],
    ]
    assert ["metrics", str(tmp_path / "metrics.jsonl")] in lines


@pytest.mark.parametrize("content", [None, ""])
def test_table_of_a_run_whose_metrics_are_gone_says_so(content, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    lines = report.table(tmp_path).splitlines()
    assert lines[1] == f"{tmp_path / 'metrics.jsonl'} has no metrics (any more)"
    assert lines[-2].split() == ["checkpoints", str(tmp_path / "checkpoints")]


def test_metrics_stand_beside_the_progress_bar(history):
    screen = io.StringIO()
    with tqdm(total=30, file=screen) as bar:
        report.show_on(bar)(history[-1], 30, {})
    expected = "loss 2.50 python 2.00 cpp 2.25 manual 3.00 legal 1.00 vio 0.00 12.3k tok/s"
    assert expected in screen.getvalue()


def test_metrics_are_lines_where_there_is_no_bar(history, capsys):
    report.show_on(tqdm(total=30, disable=True))(history[-1], 30, {})
    printed = capsys.readouterr().out
    assert re.match(r"step 30/30 \| loss 2.50 \| python 2.00 .* 12.3k tok/s\n$", printed)


def test_figures_become_png_files(tmp_path):
    report.png_files(tmp_path)({}, 30, figures={"loss": Figure()})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
