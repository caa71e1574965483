// A growing array of plain data. Not std::vector: a runtime without the C++ library needs none to be built (ziglang).
#pragma once
#include <stdlib.h>
#include <string.h>

template <class T> struct List {
  T *items;
  size_t count, capacity;

  void reserve(size_t n) {
    if (n <= capacity) return;
    capacity = n > 2 * capacity ? n : 2 * capacity;
    T *moved = (T *)realloc((void *)items, capacity * sizeof(T));
    if (!moved) abort();
    items = moved;
  }
  // new elements are all zero bytes
  void resize(size_t n) {
    reserve(n);
    if (n > count) memset((void *)(items + count), 0, (n - count) * sizeof(T));
    count = n;
  }
  void reset(size_t n) {
    count = 0;
    resize(n);
  }
  void push(const T &x) {
    reserve(count + 1);
    items[count++] = x;
  }
  T pop() { return items[--count]; }
  void copy(const List &other) {
    resize(other.count);
    if (count) memcpy((void *)items, (const void *)other.items, count * sizeof(T));
  }
  bool empty() const { return count == 0; }
  T &operator[](size_t i) { return items[i]; }
  const T &operator[](size_t i) const { return items[i]; }
  T *begin() { return items; }
  T *end() { return items + count; }
};
