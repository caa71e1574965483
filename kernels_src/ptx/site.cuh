// Every inline PTX instruction of the project lives in this folder, one function each, with two bodies: the PTX, and
// (under CUKERN_EMU) portable C++ with the same lane-by-lane meaning for the CPU emulator (docs/emulator.md).
// PTX_SITE carries the caller's file and line into the emulator's fault reports; on a GPU it is nothing.
#pragma once
#ifdef CUKERN_EMU
#define PTX_SITE , const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define PTX_SITE0 const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define PTX_HERE emu_file, emu_line
#else
#define PTX_SITE
#define PTX_SITE0
#endif
