// Products of packed activations with weights that were packed once, into the order in which the kernel reads them.
//
// A panel is 32 outputs. bfloat16 panels are [inputs / 2][32][2]: a vector holds two consecutive inputs of 16 outputs, what the CPU's dot product of pairs
// wants; other types are [inputs][32]. Outputs beyond the last are zeros.
//
// Order of arithmetic: an output is one chain over the inputs, in their order, from the first to the last: by pairs in bfloat16, by 32 where the CPU has a matrix
// unit (tiles.h), singly else. Nothing splits the chain, so a row's bits depend on the row and the weights only: not on how many rows there are, on the thread
// that computes it, or on its place. Inputs are filled up with zeros to a multiple of 32, in panels and in rows of activations.

#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "tiles.h"

namespace {

constexpr int kPanel = 32;   // outputs
constexpr int kInputs = 32;  // that rows and panels are filled up to a multiple of
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

// One product's weights and bias. Mirrored by engine/kernels/structures.py.
struct Linear {
  const void* panels;
  const float* bias;  // [num_panels * 32], or null
  int32_t num_inputs, num_panels;  // inputs: a multiple of 32
};

inline int padded(int num_inputs) { return (num_inputs + kInputs - 1) / kInputs * kInputs; }

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

constexpr int kRowsOfPanel = 256;  // that multiply_panel takes at most

#if defined(TANDEM_TILES)
constexpr int kGroupsThatAsk = 8;    // of 32 rows: those that ask for the next panel, so that the others find their own
constexpr int kInputsAtOnce = 9 * 32; // of a panel, which then stay in the first cache while rows pass by

// See below. The matrix unit works on a group of rows while the last one's sums are emitted, a few rows at each step.
template <typename Emit>
class PanelByTiles {
 public:
  PanelByTiles(const uint16_t* panel, const uint16_t* x, int64_t stride, int num_rows, int num_inputs, const uint16_t* next, const Emit& emit)
      : panel_(panel), x_(x), stride_(stride), num_rows_(num_rows), emit_(emit), ahead_(reinterpret_cast<const char*>(next)),
        end_(ahead_ + size_t(num_inputs) * kPanel * sizeof *next) {
    const int num_groups = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
    lines_ = kPanel * kTileInputs * int(sizeof *next) / kLine / std::min(kGroupsThatAsk, num_groups);
    const int num_parts = num_groups == 1 ? 1 : (num_inputs + kInputsAtOnce - 1) / kInputsAtOnce;
    const int part = (num_inputs / kTileInputs + num_parts - 1) / num_parts * kTileInputs;
    rows_a_step_ = (kRowsAtOnce * kTileInputs + part - 1) / part;
    for (int first = 0; first < num_inputs; first += part) {
      last_ = first + part >= num_inputs;
      const int count = std::min(part, num_inputs - first);
      for (int row = 0; row < num_rows; row += kRowsAtOnce) first == 0 ? group<false>(row, first, count) : group<true>(row, first, count);
    }
    emit_rows(kRowsAtOnce);
  }

 private:
  template <bool kMore>
  void group(int row, int first_input, int num_inputs) {
    const int rows = std::min(kRowsAtOnce, num_rows_ - row);
    const uint16_t* outputs = panel_ + size_t(first_input) * kPanel;
    multiply_rows_of_tiles<kMore>(rows, x_ + row * stride_ + first_input, stride_ * sizeof *x_, outputs, outputs + 2 * kTileRows, 2 * kPanel * sizeof *outputs,
                                  num_inputs, sums_[row], sizeof *sums_, [&] {
      for (int i = 0; i < lines_ && ahead_ < end_; ++i, ahead_ += kLine) __builtin_prefetch(ahead_, 0, 2);
      emit_rows(rows_a_step_);
    });
    if (last_) summed_ = row + rows;
  }

  void emit_rows(int count) {
    for (; count > 0 && emitted_ < summed_; --count, ++emitted_) {
      const Floats row[kVectorsInPanel] = {Float32::load(sums_[emitted_]), Float32::load(sums_[emitted_] + kLanes)};
      emit_(emitted_, 0, row);
    }
  }

  const uint16_t *panel_, *x_;
  const int64_t stride_;
  const int num_rows_;
  const Emit& emit_;
  const char *ahead_, *end_;
  int lines_, rows_a_step_;
  bool last_ = false;
  int emitted_ = 0, summed_ = 0;  // rows
  alignas(64) float sums_[kRowsOfPanel][kPanel];
};
#endif

// Up to kRowsOfPanel rows against one panel. `emit(row, vector in the panel, kVectors sums)` is called for each row and group of vectors. `next` is the panel that this
// thread computes behind this one: asked for a bit at a time, so that memory is never idle.
template <typename T, typename Emit>
void multiply_panel(const typename T::Stored* panel, const typename Product<T>::Activation* x, int64_t stride, int num_rows, int num_inputs,
                    const typename T::Stored* next, Emit emit) {
#if defined(TANDEM_TILES)
  if constexpr (std::is_same_v<T, BFloat16>) return void(PanelByTiles<Emit>(panel, x, stride, num_rows, num_inputs, next, emit));
#endif
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
