// What is done to rows between the products: norms, rotation, gates. Float32 throughout; each row in an order of its own, whatever its neighbours.

#pragma once

#include <cmath>

#include "lanes.h"

namespace {

// x / sqrt(mean(x^2) + epsilon) * weight. Mirrored by engine/kernels/native_decoder.py.
struct Norm {
  const float* weight;  // null: there is no norm
  float epsilon;
};

inline float inverse_rms(const float* x, int size, float epsilon) {
  Floats sum = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats v = Float32::load(x + i);
    sum = sum + v * v;
  }
  float rest = 0.0f;
  for (; i < size; ++i) rest = __builtin_fmaf(x[i], x[i], rest);
  return 1.0f / std::sqrt((fold(sum, Add()) + rest) / float(size) + epsilon);
}

// y = norm(x); in place where y is x.
inline void normalize(const float* x, const Norm& norm, int size, float* y) {
  const float factor = inverse_rms(x, size, norm.epsilon);
  for (int i = 0; i < size; ++i) {
    const float scaled = x[i] * factor;
    y[i] = scaled * norm.weight[i];
  }
}

// Rotates the first 2 * num_frequencies elements of a head: element i with element i + num_frequencies.
inline void rotate(float* head, const float* cosines, const float* sines, int num_frequencies) {
  for (int i = 0; i < num_frequencies; ++i) {
    const float a = head[i], b = head[i + num_frequencies];
    const float b_sine = b * sines[i], a_sine = a * sines[i];
    head[i] = __builtin_fmaf(a, cosines[i], -b_sine);
    head[i + num_frequencies] = __builtin_fmaf(b, cosines[i], a_sine);
  }
}

enum Activation : int32_t { kSilu, kGelu, kGeluTanh };

inline Floats silu(Floats x) {
  const Floats e = exp_nonpositive(x < 0.0f ? x : -x);
  const Floats numerator = x < 0.0f ? x * e : x;
  return numerator / (1.0f + e);
}

// For what is rounded to bfloat16.
inline Floats silu_coarse(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats e = exp2_coarse(size * -1.44269504088896341f);
  const Floats numerator = x < 0.0f ? x * e : x;
  return numerator * reciprocal(e + 1.0f);
}

inline Floats gelu_tanh(Floats x) {
  const Floats inner = (x + (x * x * x) * 0.044715f) * 0.7978845608028654f;
  return (x * 0.5f) * (tanh_of(inner) + 1.0f);
}

inline Floats gelu(Floats x) {
  for (int i = 0; i < kLanes; ++i) {
    const float half = x[i] * 0.5f;
    x[i] = half * (1.0f + std::erf(x[i] * 0.70710678f));
  }
  return x;
}

template <bool kCoarse>
inline Floats activated(Activation how, Floats x) {
  switch (how) {
    case kSilu: return kCoarse ? silu_coarse(x) : silu(x);
    case kGelu: return gelu(x);
    default: return gelu_tanh(x);
  }
}

}  // namespace
