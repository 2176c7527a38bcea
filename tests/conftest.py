"""One thread for the tests and for the processes that they start, unless told otherwise.

The models here are small: on few cores one thread is several times faster than many that wait for each other.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the variable is set: it is read when torch is loaded

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
