"""Policies: pure functions from a saved tensor to its fate.

Each is hashable, compares by what it is made of, and prints as what one would type. Any function
`SavedTensor -> Fate` is a policy too; these are the usual ones and the ways to combine them.

Source: the shape of `jax.checkpoint_policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from veofunc.offload.policy import STRENGTH, Named, Policy, ask, combination, is_inside
from veofunc.offload.saved import Fate, SavedTensor

if TYPE_CHECKING:
    from veofunc.offload.plan import Plan, PlannedTensor

__all__ = [
    "all_of",
    "any_of",
    "budget",
    "everything",
    "first_of",
    "in_modules",
    "larger_than",
    "matmuls",
    "names",
    "not_",
    "nothing",
    "recompute",
]


everything = Policy("everything", None, lambda saved: Fate.OFFLOAD)
"""Offload every saved tensor that can be moved.

>>> import veofunc as vf
>>> vf.policies.everything
everything
"""

nothing = Policy("nothing", None, lambda saved: Fate.KEEP)
"""Keep every saved tensor, the baseline to compare with."""


def larger_than(nbytes: int) -> Policy:
    """Offload saved tensors of more than `nbytes` bytes.

    Args:
        nbytes: bytes, an int of at least 0.

    Raises:
        ValueError: `nbytes` is negative or not a whole number.

    Example:
        >>> import veofunc as vf
        >>> vf.policies.larger_than(1 << 20)
        larger_than(1048576)
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes must be an int >= 0 (bytes), got {nbytes!r}")
    return Policy(
        "larger_than",
        (nbytes,),
        lambda saved: Fate.OFFLOAD if saved.nbytes > nbytes else Fate.KEEP,
    )


def in_modules(*globs: str) -> Policy:
    """Offload what the modules at these paths, and the modules inside them, save.

    Args:
        globs: module paths as in `model.named_modules()`. `*`, `?` and `[..]` match within one segment:
            `"layers.*.mlp"` is the `mlp` of every layer. `offload` refuses a glob that matches nothing.

    Raises:
        ValueError: no glob, or an empty one.

    Example:
        >>> import veofunc as vf
        >>> vf.policies.in_modules("layers.*.mlp")
        in_modules('layers.*.mlp')
    """
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise ValueError(f"in_modules takes one or more non-empty module globs, got {globs!r}")
    return Policy(
        "in_modules",
        globs,
        lambda saved: Fate.OFFLOAD if any(is_inside(saved.path, glob) for glob in globs) else Fate.KEEP,
        globs=globs,
        reads_path=True,
    )


MATMULS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "addr",
        "dot",
        "matmul",
        "linear",
        "scaled_mm",
        "grouped_mm",
        "mkldnn_linear",
    )
)


recompute = Policy(
    "recompute", None, lambda saved: Fate.RECOMPUTE if saved.recomputable else Fate.KEEP, recomputes=True
)
"""Recompute what can be: what operations in the `blocks` make. Keep the rest, such as what enters them.

>>> import veofunc as vf
>>> vf.policies.first_of(vf.policies.recompute, vf.policies.everything)  # offload the rest
first_of(recompute, everything)
"""

matmuls = Policy(
    "matmuls",
    None,
    lambda saved: Fate.RECOMPUTE if saved.recomputable and not is_matmul(saved.op) else Fate.KEEP,
    recomputes=True,
)
"""Keep the products of matrices (attention among them) and recompute what else the `blocks` make.

`any_of(matmuls, not_(matmuls))` offloads what `matmuls` keeps.

Source: `jax.checkpoint_policies.dots_saveable`.
"""


def is_matmul(op: str) -> bool:
    """Whether an operation, as `SavedTensor.op` calls it, multiplies matrices."""
    return op in MATMULS or "attention" in op


def names(save: Iterable[str] = (), offload: Iterable[str] = (), recompute: Iterable[str] = ()) -> Policy:
    """Decide by the names that `veofunc.checkpoint_name` gave.

    What has none of these names is recomputed where that is possible (in `blocks`), and else kept: only
    these names are saved. If names to `recompute` are given, only those are recomputed.

    Args:
        save: names of tensors to keep.
        offload: names of tensors to offload.
        recompute: names of tensors to recompute.

    Raises:
        ValueError: no name, an empty one, or one in two of the lists.
        TypeError: one of the three is no list of names.

    Example:
        >>> import veofunc as vf
        >>> vf.policies.names(save=["q", "k"], offload=["attn_out"])
        names(save=('q', 'k'), offload=('attn_out',))

    Source: `jax.checkpoint_policies.save_and_offload_only_these_names`, `save_anything_except_these_names`.
    """
    lists = {"save": save, "offload": offload, "recompute": recompute}
    for option, given in lists.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"{option} must be a list of names, got {given!r}")
    lists = {option: tuple(given) for option, given in lists.items()}
    everything = [name for given in lists.values() for name in given]
    if not everything or not all(isinstance(name, str) and name for name in everything):
        raise ValueError(f"names takes one or more non-empty names, got {lists!r}")
    if len(set(everything)) < len(everything):
        twice = sorted({name for name in everything if everything.count(name) > 1})
        raise ValueError(f"each name must be given once, in save, offload or recompute; got twice: {twice}")
    fates = {name: Fate.KEEP for name in lists["save"]}
    fates |= {name: Fate.OFFLOAD for name in lists["offload"]}
    fates |= {name: Fate.RECOMPUTE for name in lists["recompute"]}

    def decide(saved: SavedTensor) -> Fate:
        fate = fates.get(saved.name, Fate.KEEP if lists["recompute"] else Fate.RECOMPUTE)
        return fate if saved.recomputable or fate is not Fate.RECOMPUTE else Fate.KEEP

    return Policy(
        "names",
        tuple(Named((option, given)) for option, given in lists.items() if given),
        decide,
        names=tuple(everything),
        reads_name=True,
        recomputes=bool(lists["recompute"]),
    )


def budget(
    plan: Plan, *, bytes_per_second: float, flops_per_second: float, nbytes: int | None = None
) -> Policy:
    """Of what a plan offloads, offload as much as can be copied while forward computes; keep the rest.

    The oldest tensors come first: they would be held longest. Each is taken if its copy, after those before
    it, ends before the forward pass does; backward takes longer, so its copies hide then too. Tensors are
    recognised by `index` and `op`, so plan the function that will run.

    Args:
        plan: from `veofunc.plan_offload(fn, everything, ...)`, or with another policy to choose from.
        bytes_per_second: what the link copies one way, measured.
        flops_per_second: what the device achieves on the whole forward pass, measured: `plan.flops` over the
            seconds of one.
        nbytes: the most bytes to offload; by default no limit.

    Raises:
        ValueError: a rate is not a finite number above 0, or `nbytes` not an int of at least 0.
        TypeError: `plan` is no plan.

    Example:
        >>> import tempfile, torch, veofunc as vf
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> store = vf.DiskStore(tempfile.mkdtemp())
        >>> plan = vf.plan_offload(model, vf.policies.everything, store=store)(torch.ones(32, 64))
        >>> policy = vf.policies.budget(plan, bytes_per_second=1e6, flops_per_second=1e11)
        >>> policy
        budget(plan, bytes_per_second=1000000.0, flops_per_second=100000000000.0)
        >>> vf.plan_offload(model, policy, store=store)(torch.ones(32, 64)).count["moved"]
        0

    Source: the condition that a copy hides behind compute, as in SSDTrain (arXiv 2408.10013).
    """
    if not hasattr(plan, "tensors"):
        raise TypeError(f"plan must come from veofunc.plan_offload(...)(...), got {type(plan).__name__}")
    for option, rate in (("bytes_per_second", bytes_per_second), ("flops_per_second", flops_per_second)):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < inf:
            raise ValueError(f"{option} must be a finite number > 0, got {rate!r}")
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
        raise ValueError(f"nbytes must be an int >= 0 (bytes) or None, got {nbytes!r}")
    fates: dict[tuple, Fate] = {}
    free_at, left = 0.0, inf if nbytes is None else nbytes
    for key, tensors in _by_key(plan.tensors).items():
        first = tensors[0]
        fate = first.fate if first.same_as is None else fates[_key(plan.tensors[first.same_as].saved)]
        if fate is Fate.OFFLOAD and first.same_as is None:
            size = sum(tensor.saved.nbytes for tensor in tensors)
            done_at = max(free_at, first.flops / flops_per_second) + size / bytes_per_second
            if done_at <= plan.flops / flops_per_second and size <= left:
                free_at, left = done_at, left - size
            else:
                fate = Fate.KEEP
        fates[key] = fate

    def decide(saved: SavedTensor) -> Fate:
        return fates.get(_key(saved), Fate.RECOMPUTE if saved.recomputable else Fate.KEEP)

    rates = (
        ("bytes_per_second", bytes_per_second),
        ("flops_per_second", flops_per_second),
        ("nbytes", nbytes),
    )
    return Policy(
        "budget",
        (Named(("plan",)), *(Named(pair) for pair in rates if pair[1] is not None)),
        decide,
        data=frozenset(fates.items()),
        recomputes=Fate.RECOMPUTE in fates.values(),
    )


def _by_key(tensors: Iterable[PlannedTensor]) -> dict[tuple, list[PlannedTensor]]:
    """In order. Most keys have one tensor; another that is held for recomputation may have the same."""
    groups: dict[tuple, list[PlannedTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_key(tensor.saved), []).append(tensor)
    return groups


def _key(saved: SavedTensor) -> tuple[int, str]:
    return saved.index, saved.op


def any_of(*policies: Callable[[SavedTensor], Fate]) -> Policy:
    """The most that any of `policies` wants: OFFLOAD before RECOMPUTE before KEEP.

    Raises:
        ValueError: no policy.
        TypeError: what is no policy; when it is asked, what answers something else than a `Fate`.

    Example:
        >>> import veofunc as vf
        >>> p = vf.policies
        >>> p.any_of(p.in_modules("head"), p.larger_than(1024))
        any_of(in_modules('head'), larger_than(1024))
    """
    return combination(
        "any_of",
        policies,
        lambda saved: max((ask(policy, saved) for policy in policies), key=STRENGTH.index),
    )


def all_of(*policies: Callable[[SavedTensor], Fate]) -> Policy:
    """The least that all of `policies` want: KEEP before RECOMPUTE before OFFLOAD.

    So a policy that only offloads serves as a condition: `all_of(larger_than(1 << 20), recompute)`
    recomputes what is larger.

    Raises:
        ValueError: no policy.
        TypeError: what is no policy; when it is asked, what answers something else than a `Fate`.

    Example:
        >>> import veofunc as vf
        >>> p = vf.policies
        >>> p.all_of(p.in_modules("layers.*"), p.larger_than(1024))
        all_of(in_modules('layers.*'), larger_than(1024))
    """
    return combination(
        "all_of",
        policies,
        lambda saved: min((ask(policy, saved) for policy in policies), key=STRENGTH.index),
    )


def not_(policy: Callable[[SavedTensor], Fate]) -> Policy:
    """Offload what `policy` keeps, and keep what it offloads or recomputes.

    Raises:
        ValueError: no policy.
        TypeError: what is no policy; when it is asked, what answers something else than a `Fate`.

    Example:
        >>> import veofunc as vf
        >>> vf.policies.not_(vf.policies.in_modules("head"))
        not_(in_modules('head'))
    """
    return combination(
        "not_",
        (policy,),
        lambda saved: Fate.OFFLOAD if ask(policy, saved) is Fate.KEEP else Fate.KEEP,
        recomputes=False,
    )


def first_of(*policies: Callable[[SavedTensor], Fate]) -> Policy:
    """The first answer of `policies`, in order, that is not KEEP; KEEP if there is none.

    Raises:
        ValueError: no policy.
        TypeError: what is no policy; when it is asked, what answers something else than a `Fate`.

    Example:
        >>> import veofunc as vf
        >>> p = vf.policies
        >>> p.first_of(p.larger_than(1 << 20), p.in_modules("head"))
        first_of(larger_than(1048576), in_modules('head'))
    """

    def decide(saved: SavedTensor) -> Fate:
        answers = (ask(policy, saved) for policy in policies)
        return next((fate for fate in answers if fate is not Fate.KEEP), Fate.KEEP)

    return combination("first_of", policies, decide)
