// The emulator's runtime library, built once per machine. Kernels are separate shared objects that call it.
#include "emu/narrow.h"
#include "emu/runtime_abi.h"
#include "launch.h"
#include "tensor.h"
#include "atomics.h"
