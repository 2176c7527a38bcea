"""Where offloaded tensors wait for backward.

`store.py` says what a store is. `host.py` stands on `ferry.py`, `lanes.py` and `arena.py`; `disk.py` on
`traffic.py`, `buffers.py`, `diskfile.py` and `malloc.py`; both on `codec.py`, `space.py` and `monitor.py`.
"""
