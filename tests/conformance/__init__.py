"""What every PTX wrapper of kernels_src/ptx does on a GPU, kept as data, so that the emulator can be held to it."""
