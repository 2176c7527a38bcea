"""Activation offload: `offload` first, then policies, stores, and the handles autograd holds."""
