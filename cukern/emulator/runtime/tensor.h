// ldmatrix, mma and cp.async. Lane-by-lane meaning as in the PTX ISA; tests/conformance compares it with a GPU.
#pragma once
#include "memory_check.h"
#include "mma.h"
#include "schedule.h"

static void need_full_warp(Warp *warp, uint32_t lanes, const char *what) {
  if (lanes == ~0u) return;
  Thread *t = warp->threads + __builtin_ctz(lanes);
  fail(F_MASK, t->file, t->line, "%s needs all 32 lanes, only mask 0x%08x has arrived", what, lanes);
}

// Lane 4*g + t posts element pairs of row g, so eight consecutive halves of a matrix row are 16 consecutive bytes of `word`.
template <class T> static void op_mma(Worker *, Warp *warp, uint32_t lanes) {
  need_full_warp(warp, lanes, "mma.m16n8k16");
  alignas(64) uint16_t a[16][16], bt[8][16];
  alignas(64) float c[16][8], posted[4][32];
  for (int r = 0; r < 4; ++r)
    for (int g = 0; g < 8; ++g) memcpy(&a[g + 8 * (r & 1)][8 * (r >> 1)], &warp->word[r][4 * g], 16);
  for (int r = 0; r < 2; ++r)
    for (int g = 0; g < 8; ++g) memcpy(&bt[g][8 * r], &warp->word[4 + r][4 * g], 16);
  memcpy(posted, warp->word[6], sizeof posted);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) c[i][j] = posted[2 * (i >> 3) + (j & 1)][4 * (i & 7) + (j >> 1)];
  mma::multiply<T>(a, bt, c);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) posted[2 * (i >> 3) + (j & 1)][4 * (i & 7) + (j >> 1)] = c[i][j];
  memcpy(warp->word[6], posted, sizeof posted);
}
PUBLIC EmuFloat4 emu_mma_call(float c0, float c1, float c2, float c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint32_t b0, uint32_t b1, int is_half, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  Warp *warp = t->warp;
  const uint32_t in[10] = {a0, a1, a2, a3, b0, b1, emu::bits<uint32_t>(c0), emu::bits<uint32_t>(c1), emu::bits<uint32_t>(c2), emu::bits<uint32_t>(c3)};
  for (int i = 0; i < 10; ++i) warp->word[i][t->lane] = in[i];
  t->file = file, t->line = line;
  collective(w, t, ~0u, is_half ? op_mma<mma::Half> : op_mma<mma::Bf16>, "mma.m16n8k16", file, line);
  EmuFloat4 d;
  for (int i = 0; i < 4; ++i) d.v[i] = emu::bits<float>(warp->word[6 + i][t->lane]);
  return d;
}

static void op_ldmatrix(Worker *, Warp *warp, uint32_t lanes) {
  need_full_warp(warp, lanes, "ldmatrix");
  const int n = warp->source[0] >> 1, trans = warp->source[0] & 1;
  for (int m = 0; m < n; ++m) {
    // lane 4*g + t receives elements 2t and 2t + 1 of row g: rows one after the other
    if (!trans)
      for (int r = 0; r < 8; ++r) memcpy(&warp->word[m][4 * r], (const void *)warp->value[m * 8 + r], 16);
    else {
      uint16_t rows[8][8], columns[8][8];
      for (int r = 0; r < 8; ++r) memcpy(rows[r], (const void *)warp->value[m * 8 + r], 16);
      for (int r = 0; r < 8; ++r)
        for (int k = 0; k < 8; ++k) columns[k][r] = rows[r][k];
      memcpy(warp->word[m], columns, sizeof columns);
    }
  }
}
PUBLIC EmuWord4 emu_ldmatrix_call(const void *row, int n, int trans, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  Warp *warp = t->warp;
  if (t->lane < 8 * n) emu_access(row, 16, false, 16, "ldmatrix", file, line);
  warp->value[t->lane] = (uint64_t)row;
  warp->source[t->lane] = n << 1 | trans;
  t->file = file, t->line = line;
  collective(w, t, ~0u, op_ldmatrix, "ldmatrix", file, line);
  EmuWord4 d = {};
  for (int i = 0; i < n; ++i) d.v[i] = warp->word[i][t->lane];
  return d;
}

PUBLIC void emu_cp_async(void *dst, const void *src, int bytes, int src_bytes, const char *file, int line) {
  Worker *w = tls_worker;
  Thread *t = w->current;
  const CopyInFlight c = {dst, src, bytes, src_bytes, t->copy_group, file, line};
  emu_access(dst, (unsigned)bytes, true, (unsigned)bytes, "cp.async target", file, line);
  if (src_bytes) emu_access(src, (unsigned)src_bytes, false, (unsigned)bytes, "cp.async source", file, line);
  if (w->launch->check) begin_copy(w, c, CALLER);
  memset(dst, 0xff, (size_t)bytes);  // who reads too early sees NaN
  t->copies.push(c);
}
PUBLIC void emu_cp_commit() { ++tls_worker->current->copy_group; }
PUBLIC void emu_cp_wait(int pending) { finish_copies(tls_worker, tls_worker->current, pending); }
static void finish_copies(Worker *w, Thread *t, int pending) {
  if (t->copies.empty()) return;
  size_t kept = 0;
  for (const CopyInFlight &c : t->copies) {
    if (pending >= 0 && c.group + (unsigned)pending >= t->copy_group) {
      t->copies[kept++] = c;
      continue;
    }
    if (w->launch->check) end_copy(w, c);
    memcpy(c.dst, c.src, (size_t)c.src_bytes);
    memset((char *)c.dst + c.src_bytes, 0, (size_t)(c.bytes - c.src_bytes));
  }
  t->copies.count = kept;
}
