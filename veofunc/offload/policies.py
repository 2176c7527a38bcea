"""Policies: pure functions from a saved tensor to its fate.

Each is hashable, compares by what it is made of, and prints as what one would type. Any function
`SavedTensor -> Fate` is a policy too; these are the usual ones and the ways to combine them.

Source: the shape of `jax.checkpoint_policies`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    "not_",
    "nothing",
]


@dataclass(frozen=True, repr=False)
class Policy:
    """A named policy.

    Attributes:
        name: its name, and `arguments` what it was made with: as one would type it.
        decide: the function.
        globs: the module globs anywhere in it.
        reads_path: whether it looks at `path`; if none does, nobody needs to follow the modules.
    """

    name: str
    arguments: tuple | None
    decide: Callable[[SavedTensor], Fate] = field(compare=False)
    globs: tuple[str, ...] = field(default=(), compare=False)
    reads_path: bool = field(default=False, compare=False)

    def __call__(self, saved: SavedTensor) -> Fate:
        return self.decide(saved)

    def __repr__(self) -> str:
        if self.arguments is None:
            return self.name
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


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
        globs,
        reads_path=True,
    )


def any_of(*policies: Callable[[SavedTensor], Fate]) -> Policy:
    """Offload what any of `policies` offloads; keep the rest.

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
        lambda saved: Fate.OFFLOAD if any(ask(p, saved) is Fate.OFFLOAD for p in policies) else Fate.KEEP,
    )


def all_of(*policies: Callable[[SavedTensor], Fate]) -> Policy:
    """Offload what all of `policies` offload; keep the rest.

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
        lambda saved: Fate.OFFLOAD if all(ask(p, saved) is Fate.OFFLOAD for p in policies) else Fate.KEEP,
    )


def not_(policy: Callable[[SavedTensor], Fate]) -> Policy:
    """Keep what `policy` offloads and offload what it keeps.

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
        lambda saved: Fate.KEEP if ask(policy, saved) is Fate.OFFLOAD else Fate.OFFLOAD,
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


def _combination(name: str, policies: tuple, decide: Callable[[SavedTensor], Fate]) -> Policy:
    if not policies:
        raise ValueError(f"{name} takes one or more policies, got none")
    for policy in policies:
        if not callable(policy):
            raise TypeError(f"{name} takes policies (SavedTensor -> Fate), got {policy!r}")
    globs = tuple(glob for policy in policies for glob in getattr(policy, "globs", ()))
    reads_path = any(getattr(policy, "reads_path", True) for policy in policies)  # a function may
    return Policy(name, policies, decide, globs, reads_path)
