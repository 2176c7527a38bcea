"""What a run shows: a progress bar, metrics and figures of every window, a table at the end."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import data
from matplotlib.figure import Figure
from tqdm import tqdm

import veofunc as vf


def make_log(out: Path, bar: tqdm, *, tokens_per_step: int) -> Callable:
    """A function that divides the sums of a window, draws them, and hands both to every sink."""
    sink = vf.log.several(
        vf.log.json_lines(out / "metrics.jsonl", resume_step=bar.n),
        vf.log.wandb(
            project="veofunc-example",
            name=out.name,
            config=json.loads((out / "run.json").read_text()),
            dir=out,
            settings={"silent": True, "console": "off"},
        ),
        png_files(out),
        show_on(bar),
    )
    history = read_metrics(out)
    last_step, last_time = bar.n, time.perf_counter()

    def log(window: vf.Window, objective: Callable, step: int) -> None:
        nonlocal last_step, last_time
        losses = vf.channel_metrics(window.obs, objective.channels)
        loss = sum(losses[name] for name in losses if name.startswith("channel_loss_weighted/"))
        seconds = time.perf_counter() - last_time
        speed = (step - last_step) * tokens_per_step / seconds
        metrics = {"loss": loss, "tokens_per_second": speed} | losses
        metrics |= vf.router_metrics(window.obs, objective.routers)
        history.append({"step": step} | metrics)
        caption = f"steps {window.first_step}-{window.last_step}"
        figures = {
            "router_heatmap": vf.router_heatmap(window.obs, objective.routers, caption=caption),
            "router_violation": vf.router_plot((line["step"], line) for line in history),
            "channel_loss": vf.channel_plot((line["step"], line) for line in history),
        }
        sink(metrics, step, figures=figures)
        last_step, last_time = step, time.perf_counter()

    return log


def progress_bar(start: int, steps: int) -> tqdm:
    """A bar that counts steps, from the first on; there is none unless stderr is a terminal."""
    bar_format = "{n_fmt}/{total_fmt} {bar:5} {elapsed}<{remaining} {desc}"
    return tqdm(total=steps, initial=start, bar_format=bar_format, disable=None, delay=1e-6)


def show_on(bar: tqdm) -> vf.log.Sink:
    """A sink that writes the metrics beside the bar, or as lines where there is none."""

    def sink(metrics: dict[str, float], step: int, figures: dict[str, Figure]) -> None:
        parts = [f"loss {metrics['loss']:.2f}"]
        for name in data.CHANNELS:
            parts.append(f"{name} {metrics.get(f'channel_loss/{name}', math.nan):.2f}")
        parts.append(f"vio {metrics['moe/max_vio/max']:.2f}")
        parts.append(f"{metrics['tokens_per_second'] / 1000:.1f}k tok/s")
        if bar.disable:
            print(f"step {step}/{bar.total} | {' | '.join(parts)}", flush=True)
        else:
            bar.set_description_str(" ".join(parts))

    return sink


def png_files(directory: Path) -> vf.log.Sink:
    """A sink that keeps the newest figures as PNG files."""

    def sink(metrics: dict[str, float], step: int, figures: dict[str, Figure]) -> None:
        for name, figure in figures.items():
            figure.savefig(directory / f"{name}.png", dpi=150)

    return sink


def read_metrics(out: Path) -> list[dict]:
    """The lines of metrics that a run has written so far."""
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(out: Path) -> str:
    """What the run has come to, and where it is, in a dozen lines."""
    files = {
        "metrics": "metrics.jsonl",
        "loss plot": "channel_loss.png",
        "routing heatmap": "router_heatmap.png",
        "checkpoints": "checkpoints",
        "W&B": "wandb",
    }
    history = read_metrics(out)
    lines = losses_table(history) if history else [f"{out / files['metrics']} has no metrics (any more)"]
    return "\n".join(["", *lines, "", *(f"{what:<24}{out / name}" for what, name in files.items())])


def losses_table(history: list[dict]) -> list[str]:
    """The first and the last line of metrics side by side, and all tokens."""
    first, last = history[0], history[-1]
    row, numbers = "{:<24}{:>10}{:>10}{:>12}".format, "{:<24}{:>10.3f}{:>10.3f}".format

    def first_and_last(name: str) -> list[float]:
        return [math.nan if line.get(name) is None else line[name] for line in (first, last)]

    lines = [row("loss, nats per byte", f"step {first['step']}", f"step {last['step']}", "tokens")]
    for name in data.CHANNELS:
        num_tokens = sum(line.get(f"channel_tokens/{name}", 0) for line in history)
        losses = numbers(f"  {name}", *first_and_last(f"channel_loss/{name}"))
        lines.append(f"{losses}{num_tokens:>12,.0f}")
    return [*lines, numbers("router max violation", *first_and_last("moe/max_vio/max"))]
