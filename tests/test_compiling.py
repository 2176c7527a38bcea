"""Nothing is compiled while somebody wants things as they were written, and all is again afterwards."""

import threading

import pytest
import torch

from veofunc.compiling import as_written


@pytest.fixture
def num_compiled():
    """A function that runs a fresh compiled function, and says how many graphs were made for it."""

    def run():
        torch.compiler.reset()
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(graph)
            return graph

        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(2))
        return len(graphs)

    return run


def test_what_is_compiled_runs_as_it_was_written(num_compiled):
    with as_written():
        assert num_compiled() == 0
        with as_written():
            assert num_compiled() == 0
        assert num_compiled() == 0
    assert num_compiled() == 1


def test_an_exception_ends_it(num_compiled):
    with pytest.raises(RuntimeError, match="boom"), as_written():
        raise RuntimeError("boom")
    assert num_compiled() == 1


def test_of_two_threads_that_overlap_the_last_ends_it(num_compiled):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with as_written():
            entered.set()
            leave.wait(timeout=60)

    with as_written():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(timeout=60)
    assert num_compiled() == 0
    leave.set()
    thread.join()
    assert num_compiled() == 1
