// What becomes of a product's sums: called with a row, the first of 32 outputs, and two vectors of sums.

#pragma once

#include <type_traits>

#include "linear.h"
#include "rows.h"

namespace {

struct Store {
  float* out;
  const float* bias;
  int size;
  void operator()(int row, int first, const Floats* sums) const {
    for (int v = 0; v < kVectors && first + v * kLanes < size; ++v) {
      Floats x = sums[v];
      if (bias != nullptr) x = x + Float32::load(bias + first + v * kLanes);
      Float32::store(out + size_t(row) * size + first + v * kLanes, x);
    }
  }
};

struct AddTo {
  float* out;
  const float* bias;
  int size, stride;
  bool over;  // writes instead of adding
  void operator()(int row, int first, const Floats* sums) const {
    for (int v = 0; v < kVectors && first + v * kLanes < stride; ++v) {
      float* o = out + size_t(row) * stride + first + v * kLanes;
      Floats x = sums[v];
      if (bias != nullptr) x = x + Float32::load(bias + first + v * kLanes);
      if (!over) x = x + Float32::load(o);
      Float32::store(o, x);
    }
  }
};

template <typename T>
struct Gate {
  typename Product<T>::Activation* out;
  ::Activation how;
  int size;
  void operator()(int row, int first, const Floats* sums) const {
    static_assert(kVectors == 2, "a gate and what it gates come together");
    if (first / 2 < size) Product<T>::store(out + size_t(row) * padded(size) + first / 2, activated<std::is_same_v<T, BFloat16>>(how, sums[0]) * sums[1]);
  }
};

struct Logits {
  float* out;
  int size;
  void operator()(int row, int first, const Floats* sums) const {
    for (int v = 0; v < kVectors && first + v * kLanes < size; ++v) {
      const int num_left = std::min(kLanes, size - first - v * kLanes);
      memcpy(out + size_t(row) * size + first + v * kLanes, &sums[v], num_left * sizeof(float));
    }
  }
};

}  // namespace
