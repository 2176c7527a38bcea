"""Tensors of a checkpoint as a safetensors file, which other programs read."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from torch import Tensor

from veofunc.checkpoint.manifest import CheckpointError, Entry, TreePath, check_step, damage, step_numbers
from veofunc.checkpoint.restore import Request, read_indices, read_step
from veofunc.checkpoint.storage import Storage, open_storage

__all__ = ["choose_step", "to_safetensors"]


def to_safetensors(
    directory: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    step: int | None = None,
    section: str = "model",
    force: bool = False,
) -> dict[str, Tensor]:
    """Write all tensors of one section of a saved step, whole and verified, into a safetensors file.

    The names are those in the section. Tied
    tensors are written once for each name, as the format has no ties; tensors that each rank saved its
    own of are named "rank_<n>.<name>". The file appears when it is complete.

    Args:
        directory: where the steps are, as `async_checkpointer` was given it.
        file: the new file.
        step: which one; by default the newest complete one.
        section: the top-level key of the state, as "model" or "ema".
        force: whether a file may be there already; it is replaced.

    Returns:
        The tensors by their names, on the CPU.

    Raises:
        CheckpointError: there is no such step, or a file of it is damaged; names it.
        FileExistsError: `file` exists.
        ImportError: the safetensors package is not installed.
        OSError: `file` cannot be written.
        ValueError: the step has no such section; lists those that it has. Or tensors have a dtype that
            the format lacks; names them.

    Warns:
        RuntimeWarning: a newer step is skipped; says what is wrong with it.

    Example:
        >>> import torch, veofunc as vf
        >>> from veofunc.checkpoint.export import to_safetensors
        >>> model = torch.nn.Linear(2, 1)
        >>> with vf.async_checkpointer(vf.train_state(model)) as ckpt:
        ...     save = ckpt.save(vf.train_state(model), step=7)
        >>> tensors = to_safetensors("checkpoints", "model.safetensors")
        >>> from safetensors.torch import load_file
        >>> model.load_state_dict(load_file("model.safetensors"))
        <All keys matched successfully>
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export needs the safetensors package: pip install 'veofunc[export]'") from error
    file = Path(file)
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists; take another name, or replace it with force=True (--force)")
    storage = open_storage(directory)
    step = choose_step(storage, step)
    tensors = _read_section(storage, step, section)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        save_file(tensors, partial, {"format": "pt", "step": str(step)})
        partial.replace(file)
    except KeyError as error:
        names = [name for name, tensor in tensors.items() if tensor.dtype in error.args]
        raise ValueError(f"safetensors has no dtype {error.args[0]}, which these have: {names}") from error
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return tensors


def choose_step(storage: Storage, step: int | None) -> int:
    """The step that is meant: by default the newest complete one, as far as file sizes tell.

    Raises:
        CheckpointError: there is none, or not that one.

    Warns:
        RuntimeWarning: a newer one is skipped; says what is wrong with it.
    """
    steps = step_numbers(storage)
    if step is not None:
        check_step(step)
        if step not in steps:
            raise CheckpointError(f"there is no step {step} in {storage.root}; there are {steps}")
        return step
    for newest in reversed(steps):
        reason = damage(storage, newest)
        if not reason:
            return newest
        warnings.warn(f"step {newest} is skipped: {reason}", RuntimeWarning, stacklevel=3)
    raise CheckpointError(f"there is no complete step in {storage.root}")


def _read_section(storage: Storage, step: int, section: str) -> dict[str, Tensor]:
    """All tensors of a section by the names in it, none sharing memory with another."""
    _, indices = read_indices(storage, step)
    entries = [entry for index in indices.values() for entry in index.entries]
    sections = sorted({entry.path[0] for entry in entries})
    if section not in sections:
        raise ValueError(f"section must be one of {sections}, which step {step} has, got {section!r}")
    request = Request(
        like={},
        only=frozenset([section]),
        strict=False,
        cast=False,
        verify="full",
        device=None,
        ranks="all",
        rank=0,
        world_size=1,
    )
    leaves = read_step(storage, step, request)
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if entry.path[0] == section:
            place = _place(entry)
            tensor = leaves[place]
            assert isinstance(tensor, Tensor)
            tensors[".".join(place[1:] or place)] = tensor.clone() if entry.tie else tensor
    return tensors


def _place(entry: Entry) -> TreePath:
    """Where `read_step` puts a leaf."""
    section, *rest = entry.path
    return entry.path if entry.rank is None else (section, f"rank_{entry.rank}", *rest)
