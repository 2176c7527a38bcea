"""`offload` and `torch.compile`.

`modules.py` finds what is compiled, `regions.py` knows what a compiled region saves, and `partition.py` has
the policy decide inside of one.
"""
