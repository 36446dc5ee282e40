"""`Session` and the training loop: how a step is opened, laid out in one slab, bound and run."""
