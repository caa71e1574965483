"""Do the tests notice a fault? Typical faults planted in our own kernels, one at a time."""
