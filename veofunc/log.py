"""Sinks for metrics. A sink is a function `(metrics, step, figures={})`; any function like that will do.

`metrics` is what the `*_metrics` functions return, `dict[str, float]`; `figures` maps names to matplotlib
figures. `several(...)` makes one sink of many.
"""

from __future__ import annotations

import json
import math
import operator
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

__all__ = ["Sink", "json_lines", "several", "terminal", "wandb"]

Sink = Callable[..., None]
FIRST_WORDS = '{"step": '  # of every line of metrics
NO_FIGURES: Mapping[str, Any] = MappingProxyType({})


def terminal(*keys: str, write: Callable[[str], Any] = print) -> Sink:
    """A sink that prints one line per call.

    Args:
        keys: names or prefixes of the metrics to print, in this order; by default all metrics.
        write: prints one line. With a progress bar, `tqdm.write`.

    Example:
        >>> import veofunc as vf
        >>> log = vf.log.terminal("channel_loss/")
        >>> log({"channel_loss/python": 2.3125, "moe/max_vio/max": 0.5}, 100)
        step 100 | channel_loss/python 2.312
    """

    def sink(metrics: Mapping[str, float], step: int, figures: Mapping[str, Any] = NO_FIGURES):
        chosen = [name for key in keys for name in metrics if name.startswith(key)]
        shown = dict.fromkeys(chosen if keys else metrics)  # each once
        write(" | ".join([f"step {step}", *(f"{name} {metrics[name]:.4g}" for name in shown)]))

    return sink


def json_lines(path: str | os.PathLike, *, resume_step: int | None = None) -> Sink:
    """A sink that appends `{"step": .., <metric>: <value>, ..}` to a file, one line per call.

    A line is in the file when the call returns, so a killed process loses none. Values that JSON lacks
    (NaN, infinities) become null. Figures are not written.

    Args:
        path: the file; its directory is made.
        resume_step: the step that training goes on from. Lines of later steps, and a line that a crash
            left unfinished, are removed now: they will be written again. By default nothing is removed.

    Raises:
        ValueError: with `resume_step`, if a line is not one of ours; the file is left alone. At the call, if
            a metric is no number or is called `step`.
        TypeError: at the call, `step` is not an int.
        OSError: the line cannot be written; then nothing of it is in the file.

    Example:
        >>> import pathlib, tempfile, veofunc as vf
        >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> vf.log.json_lines(path)({"loss": 2.5}, 1)
        >>> print(path.read_text(), end="")
        {"step": 1, "loss": 2.5}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if resume_step is not None and path.exists():
        _cut_after(path, resume_step)

    def sink(metrics: Mapping[str, float], step: int, figures: Mapping[str, Any] = NO_FIGURES):
        if "step" in metrics:
            raise ValueError("a metric may not be called 'step', the name of the step itself")
        values = {name: _json_number(name, value) for name, value in metrics.items()}
        _append_line(path, json.dumps({"step": operator.index(step), **values}))

    return sink


def wandb(run: Any = None, **init: Any) -> Sink:
    """A sink that logs to Weights & Biases, figures as images.

    Without a key, or if the server cannot be reached, the run is offline by itself and can be sent later
    with `wandb sync`; `mode=` and `WANDB_MODE` decide otherwise.

    Args:
        run: a run that you made and finish yourself.
        init: arguments of `wandb.init`, if no run is given: `project`, `dir`, `config`, ... That run is
            finished when the process ends.

    Raises:
        ValueError: both a run and arguments for one.
    """
    import matplotlib.pyplot  # noqa: F401  # wandb.Image looks for it, and both are slow to import
    import wandb as wb

    if run is not None and init:
        raise ValueError(f"pass a run or arguments for wandb.init, not both; got run and {list(init)}")
    if run is None:
        if "mode" not in init and "WANDB_MODE" not in os.environ and not _wandb_reachable(wb):
            init["mode"] = "offline"
        run = wb.init(**init)

    def sink(metrics: Mapping[str, float], step: int, figures: Mapping[str, Any] = NO_FIGURES):
        images = {name: wb.Image(figure) for name, figure in figures.items()}
        run.log({**metrics, **images}, step=step)

    return sink


def several(*sinks: Sink) -> Sink:
    """One sink that calls all of `sinks`, in order.

    Raises:
        TypeError: what is no sink.

    Example:
        >>> import veofunc as vf
        >>> log = vf.log.several(vf.log.terminal(), lambda metrics, step, figures={}: None)
        >>> log({"loss": 2.5}, 1)
        step 1 | loss 2.5
    """
    for sink in sinks:
        if not callable(sink):
            raise TypeError(f"a sink must be a function (metrics, step, figures={{}}), got {sink!r}")

    def sink(metrics: Mapping[str, float], step: int, figures: Mapping[str, Any] = NO_FIGURES):
        for each in sinks:
            each(metrics, step, figures=figures)

    return sink


def _json_number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name!r} must be a number, got {value!r}") from error
    return number if math.isfinite(number) else None


def _append_line(path: Path, line: str) -> None:
    """Adds `line` as a line of its own, or nothing at all."""
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"  # after what a crash left unfinished
        content = start + line.encode() + b"\n"
        try:
            written = file.write(content)
            if written < len(content):
                file.write(content[written:])  # says why
        except OSError:
            file.truncate(end)
            raise


def _cut_after(path: Path, step: int) -> None:
    """Rewrites a file of JSON lines without those of later steps and without unfinished ones."""
    kept = []
    path = path.resolve()  # a link stays one
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), start=1):
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError) as error:
            if not FIRST_WORDS.startswith(line[: len(FIRST_WORDS)]):
                raise ValueError(f"{path}, line {number}, is not a line of metrics: {line!r}") from error
            continue  # the beginning of one of ours
        if keep:
            kept.append(line + "\n")
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept))
    shutil.copymode(path, beside)
    beside.replace(path)


def _wandb_reachable(wb: Any) -> bool:
    """Whether the server answers and there is a key for it."""
    url = urlparse(wb.setup().settings.base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=3).close()
    except OSError:
        return False
    return wb.login(prompt=False)
