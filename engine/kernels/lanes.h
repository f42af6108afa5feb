// Vectors of 16 floats, in the compilers' vector extension: one instruction each with AVX-512, several elsewhere, the same arithmetic everywhere.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <typename V, typename P>
inline V load_as(const P* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}

struct Float32 {
  typedef float Stored;
  static Floats load(const Stored* p) { return load_as<Floats>(p); }
  static void store(Stored* p, Floats x) { memcpy(p, &x, sizeof x); }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static Floats load(const Stored* p) {
    return (Floats)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
  }
#if defined(__AVX512BF16__)
  static void store(Stored* p, Floats x) {  // round to nearest even, NaN stays NaN
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &halves, sizeof halves);
  }
#else
  static void store(Stored* p, Floats x) {
    Words bits = (Words)x;
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words is_nan = (Words)(x != x);
    rounded = (is_nan & 0x7fc0u) | (~is_nan & rounded);
    Halves halves = __builtin_convertvector(rounded, Halves);
    memcpy(p, &halves, sizeof halves);
  }
#endif
};

struct Float16 {
  typedef uint16_t Stored;
#if defined(__AVX512F__)
  static Floats load(const Stored* p) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(p)); }
  static void store(Stored* p, Floats x) {
    __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &halves, sizeof halves);
  }
#else
  static Floats load(const Stored* p) {
    Floats x;
    for (int i = 0; i < kLanes; ++i) {
      _Float16 h;
      memcpy(&h, p + i, 2);
      x[i] = (float)h;
    }
    return x;
  }
  static void store(Stored* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) {
      _Float16 h = (_Float16)x[i];
      memcpy(p + i, &h, 2);
    }
  }
#endif
};

inline Floats all(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// e^x for x <= 0, within 2 ulp, exactly 1 at 0; anything below -87 gives e^-87, NaN stays NaN.
inline Floats exp_nonpositive(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  Floats shifted = x * 1.44269504088896341f + shift;
  Floats n = shifted - shift;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  Ints exponent = ((Ints)shifted - (Ints)shift + 127) << 23;
  return y * (Floats)exponent;
}

// 2^x for x up to 2, within 3e-6 of it, exactly 1 at 0: enough for what is rounded to bfloat16. Anything below -125 gives 2^-125, NaN stays NaN.
inline Floats exp2_coarse(Floats x) {
  x = x < -125.0f ? all(-125.0f) : x;
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  Floats shifted = x + shift;
  Floats r = x - (shifted - shift);
  Floats y = all(9.582818485796452e-3f);
  y = y * r + 5.590637028217316e-2f;
  y = y * r + 2.4024099111557007e-1f;
  y = y * r + 6.931241750717163e-1f;
  y = y * r + 1.0f;
  return (Floats)((Ints)y + ((Ints)shifted << 23));
}

// 1 / x for x from 1 to 2^126, within 1e-7 of it.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)x);
  const Floats error = 2.0f - x * near;
  return near * error;
#else
  return 1.0f / x;
#endif
}

// tanh x, within 2 ulp; NaN stays NaN.
inline Floats tanh_of(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats e = exp_nonpositive(size * -2.0f);
  Floats far = (1.0f - e) / (1.0f + e);
  far = x < 0.0f ? -far : far;
  Floats z = x * x;
  Floats p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  Floats near = (p * z) * x + x;
  return size < 0.625f ? near : far;
}

template <typename Op>
inline float fold(Floats x, Op op) {
  typedef float F8 __attribute__((vector_size(32)));
  typedef float F4 __attribute__((vector_size(16)));
  F8 a = op(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  F4 b = op(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7));
  F4 c = op(b, __builtin_shufflevector(b, b, 2, 3, 0, 1));
  F4 d = op(c, __builtin_shufflevector(c, c, 1, 0, 3, 2));
  return d[0];
}
struct Max {
  template <typename V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Add {
  template <typename V>
  V operator()(V a, V b) const { return a + b; }
};

// Transposes 16 rows of 16 floats.
inline void transpose(Floats (&r)[16]) {
#define EVEN_QUARTERS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_QUARTERS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  Floats t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int h = 0; h < 2; ++h) {
      r[i + 2 * h] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[i + 2 * h + 1] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  for (int c = 0; c < 4; ++c) {  // r[i + c] holds column 4 g + c of rows i to i + 3 in its quarter g
    Floats top_even = __builtin_shufflevector(r[c], r[c + 4], EVEN_QUARTERS), top_odd = __builtin_shufflevector(r[c], r[c + 4], ODD_QUARTERS);
    Floats low_even = __builtin_shufflevector(r[c + 8], r[c + 12], EVEN_QUARTERS), low_odd = __builtin_shufflevector(r[c + 8], r[c + 12], ODD_QUARTERS);
    t[c] = __builtin_shufflevector(top_even, low_even, EVEN_QUARTERS);
    t[c + 8] = __builtin_shufflevector(top_even, low_even, ODD_QUARTERS);
    t[c + 4] = __builtin_shufflevector(top_odd, low_odd, EVEN_QUARTERS);
    t[c + 12] = __builtin_shufflevector(top_odd, low_odd, ODD_QUARTERS);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
#undef EVEN_QUARTERS
#undef ODD_QUARTERS
}

}  // namespace
