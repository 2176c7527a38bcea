"""What a policy is: a pure function from a saved tensor to its fate, with a name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from veofunc.offload.saved import Fate, SavedTensor
from veofunc.transform import matches, name_of

__all__ = ["STRENGTH", "Named", "Policy", "ask", "check_made", "combination", "is_inside"]

# The fates, from the one that frees least on the device to the one that frees most.
STRENGTH = (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD)


@dataclass(frozen=True, repr=False)
class Policy:
    """A named policy.

    Attributes:
        name: its name, and `arguments` what it was made with: as one would type it.
        decide: the function.
        globs: the module globs anywhere in it.
        names: the names of tensors anywhere in it.
        data: what else it was made of, too much to print.
        reads_path: whether it looks at `path`; if none does, nobody needs to follow the modules.
        reads_name: whether it looks at `name`; if none does, nobody needs to remember what has none yet.
        recomputes: whether it may answer RECOMPUTE, which `offload` takes only with `blocks`.
    """

    name: str
    arguments: tuple | None
    decide: Callable[[SavedTensor], Fate] = field(compare=False)
    globs: tuple[str, ...] = field(default=(), compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)
    data: Hashable = None
    reads_path: bool = field(default=False, compare=False)
    reads_name: bool = field(default=False, compare=False)
    recomputes: bool = field(default=False, compare=False)

    def __call__(self, saved: SavedTensor | None = None) -> Fate:
        if saved is None:
            raise TypeError(
                f"{self!r} is a policy already and is asked about a SavedTensor: pass it as it is, without ()"
            )
        return self.decide(saved)

    def __repr__(self) -> str:
        if self.arguments is None:
            return self.name
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class Named(tuple):
    """A keyword and its value, among a policy's arguments; or the name alone of what is too long to print."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "=".join((self[0], *map(repr, self[1:])))


def ask(policy: Callable[[SavedTensor], Fate], saved: SavedTensor) -> Fate:
    """What `policy` says about `saved`.

    Raises:
        TypeError: it says something else than a `Fate`.
    """
    fate = policy(saved)
    if not isinstance(fate, Fate):
        raise TypeError(f"policy {policy!r} must return a veofunc.Fate, got {fate!r}")
    return fate


def check_made(policy: object) -> None:
    """Refuses what makes a policy, such as `larger_than` without its bytes."""
    if callable(policy) and getattr(policy, "__module__", "") == f"{__package__}.policies":
        raise TypeError(f"policy must be made by calling {name_of(policy)}(...), got the function itself")


def is_inside(path: str, glob: str) -> bool:
    """Whether `path` is a module that `glob` matches, or lies inside one."""
    return matches(".".join(path.split(".")[: len(glob.split("."))]), glob)


def combination(name: str, policies: tuple, decide: Callable[[SavedTensor], Fate], **flags: bool) -> Policy:
    if not policies:
        raise ValueError(f"{name} takes one or more policies, got none")
    for policy in policies:
        if not callable(policy):
            raise TypeError(f"{name} takes policies (SavedTensor -> Fate), got {policy!r}")
        check_made(policy)
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
