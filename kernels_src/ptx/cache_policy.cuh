// Cache policies for the `L2::cache_hint` of loads, copies and stores: what "createpolicy.fractional.L2::evict_first" and
// "..evict_last" give for all of the data. A hint alone, no result depends on it. PTX ISA, "createpolicy".
// Test: tests/test_decode_step.py
#pragma once
#include "common/types.cuh"

constexpr u64 L2_LEAVES_FIRST = 0x12F0000000000000ull, L2_LEAVES_LAST = 0x14F0000000000000ull;
