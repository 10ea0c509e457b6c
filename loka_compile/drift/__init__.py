"""Whether FP8 stays accurate while a model trains, and what happens to a layer where it does not.

``guard`` is the object around the training loop; ``in_use`` knows the kernels that run, ``strikes`` judges,
``put_back`` takes a layer out of FP8.
"""
