// Products of packed activations with weights that were packed once, into the order in which the kernel reads them.
//
// A panel is 32 outputs. bfloat16 panels are [inputs / 2][32][2]: a vector holds two consecutive inputs of 16 outputs, what the CPU's dot product of pairs
// wants; other types are [inputs][32]. Outputs beyond the last are zeros.
//
// Order of arithmetic: an output is one chain over the inputs, in their order, from the first to the last: by pairs in bfloat16, singly else. Nothing splits
// the chain, so a row's bits depend on the row and the weights only: not on how many rows there are, on the thread that computes it, or on its place.

#pragma once

#include "lanes.h"

namespace {

constexpr int kPanel = 32;  // outputs
constexpr int kVectorsInPanel = kPanel / kLanes;
// Rows and vectors of a panel that are summed at a time: as many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int kRows = 12, kVectors = 2;
#else
constexpr int kRows = 3, kVectors = 2;
#endif

// float32 and float16 weights with float32 activations.
template <typename T>
struct Product {
  typedef Float32 Scalar;  // of activations
  typedef float Activation;
  static constexpr int kInputs = 1;  // that one step of a chain takes
  typedef Floats Weights;
  static Weights load(const typename T::Stored* p) { return T::load(p); }
  static Floats step(Floats sum, const Activation* x, Weights w) { return sum + *x * w; }
  static void store(Activation* p, Floats x) { Float32::store(p, x); }
};

template <>
struct Product<BFloat16> {
  typedef BFloat16 Scalar;
  typedef uint16_t Activation;
  static constexpr int kInputs = 2;
#if defined(__AVX512BF16__)
  typedef __m512bh Weights;
  static Weights load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Floats step(Floats sum, const Activation* x, Weights w) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), w);
  }
#else
  typedef Words Weights;
  static Weights load(const uint16_t* p) { return load_as<Words>(p); }
  static Floats step(Floats sum, const Activation* x, Weights w) {
    const float first = bits_as_float(uint32_t(x[0]) << 16), second = bits_as_float(uint32_t(x[1]) << 16);
    return (sum + first * (Floats)(w << 16)) + second * (Floats)(w & 0xffff0000u);
  }
  static float bits_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
#endif
  static void store(Activation* p, Floats x) { BFloat16::store(p, x); }
};

// One product's weights and bias. Mirrored by engine/kernels/native_decoder.py.
struct Linear {
  const void* panels;
  const float* bias;  // [num_panels * 32], or null
  int32_t num_inputs, num_panels;
};

template <typename T>
inline size_t panel_bytes(int num_inputs) {
  return size_t(num_inputs) * kPanel * sizeof(typename T::Stored);
}

constexpr int kLine = 64;  // bytes

// R rows against kVectors vectors of a panel; `emit(row, vector, sums)` gets them. At each step kAhead lines are asked for, from `ahead` on.
template <typename T, int R, int kAhead, typename Emit>
inline void multiply_rows(const typename T::Stored* panel, const typename Product<T>::Activation* x, int64_t stride, int num_inputs, int vector,
                          const char* ahead, Emit emit) {
  typedef Product<T> P;
  Floats sums[R][kVectors] = {};
  const typename T::Stored* w = panel + vector * kLanes * P::kInputs;
  for (int k = 0; k < num_inputs; k += P::kInputs, w += kPanel * P::kInputs) {
    for (int i = 0; i < kAhead; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
    typename P::Weights weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = P::load(w + v * kLanes * P::kInputs);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = P::step(sums[r][v], x + r * stride + k, weights[v]);
  }
  for (int r = 0; r < R; ++r) emit(r, vector, sums[r]);
}

template <typename T, int R, typename Emit>
inline void multiply_group(const typename T::Stored* panel, const typename Product<T>::Activation* x, int64_t stride, int num_inputs, const char* ahead,
                           int lines_a_step, Emit emit) {
  for (int vector = 0; vector < kVectorsInPanel; vector += kVectors) {
    switch (vector == 0 ? lines_a_step : 0) {
      case 0: multiply_rows<T, R, 0>(panel, x, stride, num_inputs, vector, ahead, emit); break;
      case 1: multiply_rows<T, R, 1>(panel, x, stride, num_inputs, vector, ahead, emit); break;
      default: multiply_rows<T, R, 2>(panel, x, stride, num_inputs, vector, ahead, emit);
    }
  }
}

// All rows against one panel. `emit(row, vector in the panel, kVectors sums)` is called for each row and group of vectors. `next` is the panel that this
// thread computes behind this one: asked for a bit at a time, so that memory is never idle.
template <typename T, typename Emit>
void multiply_panel(const typename T::Stored* panel, const typename Product<T>::Activation* x, int64_t stride, int num_rows, int num_inputs,
                    const typename T::Stored* next, Emit emit) {
  constexpr int kLinesAStep = kPanel * Product<T>::kInputs * sizeof(typename T::Stored) / kLine;
  const int num_groups = (num_rows + kRows - 1) / kRows;
  const int lines = num_groups == 1 ? kLinesAStep : 1;
  const char* ahead = reinterpret_cast<const char*>(next);
  for (int g = 0, first = 0; g < num_groups; ++g) {
    const int rows = (num_rows - first + num_groups - g - 1) / (num_groups - g);  // groups as even as can be
    const auto at = [&](int r, int vector, const Floats* sums) { emit(first + r, vector, sums); };
    const auto* a = x + first * stride;
    const int here = g < kLinesAStep ? lines : 0;
    switch (rows) {
#define ROWS(n) \
  case n: multiply_group<T, n>(panel, a, stride, num_inputs, ahead, here, at); break;
      ROWS(1) ROWS(2) ROWS(3)
#if defined(__AVX512F__)
      ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
    }
    if (here) ahead += size_t(num_inputs) / Product<T>::kInputs * here * kLine;
    first += rows;
  }
}

}  // namespace
