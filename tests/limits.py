"""Limits of the operating system, for tests of what happens at them."""

import contextlib
import resource
from collections.abc import Generator


@contextlib.contextmanager
def largest_file(nbytes: int) -> Generator[None]:
    """While the block runs, no file of this process grows beyond `nbytes`: a real "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
