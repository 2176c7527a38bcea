"""`offload` and `torch.compile`.

`regions.py` knows what a compiled region saves, and `partition.py` has the policy decide inside of one.
"""
