"""Policies: pure functions from a saved tensor to its fate.

Each is hashable, compares by what it is made of, and prints as what one would type. Any function
`SavedTensor -> Fate` is a policy too; these are the usual ones and the ways to combine them.

Source: the shape of `jax.checkpoint_policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from veofunc.offload.saved import Fate, SavedTensor
from veofunc.transform import matches

__all__ = [
    "all_of",
    "any_of",
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


# The fates, from the one that frees least on the device to the one that frees most.
STRENGTH = (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD)

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


@dataclass(frozen=True, repr=False)
class Policy:
    """A named policy.

    Attributes:
        name: its name, and `arguments` what it was made with: as one would type it.
        decide: the function.
        globs: the module globs anywhere in it.
        names: the names of tensors anywhere in it.
        reads_path: whether it looks at `path`; if none does, nobody needs to follow the modules.
        reads_name: whether it looks at `name`; if none does, nobody needs to remember what has none yet.
        recomputes: whether it may answer RECOMPUTE, which `offload` takes only with `blocks`.
    """

    name: str
    arguments: tuple | None
    decide: Callable[[SavedTensor], Fate] = field(compare=False)
    globs: tuple[str, ...] = field(default=(), compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)
    reads_path: bool = field(default=False, compare=False)
    reads_name: bool = field(default=False, compare=False)
    recomputes: bool = field(default=False, compare=False)

    def __call__(self, saved: SavedTensor) -> Fate:
        return self.decide(saved)

    def __repr__(self) -> str:
        if self.arguments is None:
            return self.name
        arguments = (f"{a[0]}={a[1]!r}" if isinstance(a, Named) else repr(a) for a in self.arguments)
        return f"{self.name}({', '.join(arguments)})"


class Named(tuple):
    """A keyword and its value, among a policy's arguments."""


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
    return op in MATMULS or op.startswith("scaled_dot_product")


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
        rest = Fate.RECOMPUTE if saved.recomputable and not lists["recompute"] else Fate.KEEP
        return fates.get(saved.name, rest)

    return Policy(
        "names",
        tuple(Named((option, given)) for option, given in lists.items() if given),
        decide,
        names=tuple(everything),
        reads_name=True,
        recomputes=bool(lists["recompute"]),
    )


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
    return _combination(
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
    return _combination(
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
    return _combination(
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

    return _combination("first_of", policies, decide)


def ask(policy: Callable[[SavedTensor], Fate], saved: SavedTensor) -> Fate:
    """What `policy` says about `saved`.

    Raises:
        TypeError: it says something else than a `Fate`.
    """
    fate = policy(saved)
    if not isinstance(fate, Fate):
        raise TypeError(f"policy {policy!r} must return a veofunc.Fate, got {fate!r}")
    return fate


def is_inside(path: str, glob: str) -> bool:
    """Whether `path` is a module that `glob` matches, or lies inside one."""
    return matches(".".join(path.split(".")[: len(glob.split("."))]), glob)


def _combination(name: str, policies: tuple, decide: Callable[[SavedTensor], Fate], **flags: bool) -> Policy:
    if not policies:
        raise ValueError(f"{name} takes one or more policies, got none")
    for policy in policies:
        if not callable(policy):
            raise TypeError(f"{name} takes policies (SavedTensor -> Fate), got {policy!r}")
    return Policy(
        name,
        policies,
        decide,
        globs=tuple(glob for policy in policies for glob in getattr(policy, "globs", ())),
        names=tuple(name for policy in policies for name in getattr(policy, "names", ())),
        # A function may look at everything. What it answers is checked when it is asked.
        reads_path=any(getattr(policy, "reads_path", True) for policy in policies),
        reads_name=any(getattr(policy, "reads_name", True) for policy in policies),
        **{"recomputes": any(getattr(policy, "recomputes", False) for policy in policies), **flags},
    )
