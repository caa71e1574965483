// The bodies behind kernels_src/ptx: one function per instruction, called under CUKERN_EMU.
#pragma once
EMU_INLINE void emu_mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool is_half,
                                 const char *file, int line) {
  const EmuFloat4 d = emu_mma_call(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, is_half, file, line);
  for (int i = 0; i < 4; ++i) c[i] = d.v[i];
}
template <int N>
EMU_INLINE void emu_ldmatrix(uint32_t (&r)[N], int n, bool trans, const void *row, const char *file, int line) {
  const EmuWord4 d = emu_ldmatrix_call(row, n, trans, file, line);
  for (int i = 0; i < N; ++i) r[i] = d.v[i];
}
