// Which tokens may win a draw: engine/sampler.py decides among them in float64. Built by engine/kernels/build.py, called through a plain C interface.
//
// A token's noise is g = -log(-log(1 - u)), where u = (U + 1/2) / 2^32 comes from an integer hash (engine/noise.py). Its bounds come from U's leading bits
// alone: -log u >= g, and g >= -log u - 0.33 up to u = 1/2, g >= -3.14 everywhere; and log2 of a float lies at most 0.087 above its bits read as a number.
// A first pass finds the greatest lower bound of a score, a second one lists the tokens whose upper bound reaches it: a handful of some 50,000.

#include <algorithm>

#include "lanes.h"

namespace {

constexpr float kLn2 = 0.69314718f, kSlack = 2e-3f;  // slack: more than all rounding of bounds, relative to 1

struct Row {
  const float* logits;
  int32_t size;
  float highest, inverse_temperature;
  uint32_t mask, offset;
};

inline Words mix(Words x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Of float's bits, a bound of log2 from below.
inline Floats log2_below(Floats x) { return __builtin_convertvector((Ints)x, Floats) * 0x1p-23f - 127.0f; }

struct Bounds {
  Floats low, high;
};

// Of the scores of tokens `first` to `first + 16`.
inline Bounds bounds(const Row& row, int first) {
  const Words ids = (Words)(lane_numbers() + first);
  const Words leading = ((mix((mix(ids) ^ row.mask) + row.offset)) ^ 0x80000000u) >> 8;  // U / 256
  const Floats below = __builtin_convertvector((Ints)leading, Floats), above = below + 1.0f;
  Floats high = (24.0f - log2_below(below)) * kLn2;
  high = below < 1.0f ? all(23.0f) : high;
  Floats low = (24.0f - 0.087f - log2_below(above)) * kLn2 - 0.33f;
  low = above > 8388608.0f ? all(-3.15f) : low;
  Floats logits = {};
  if (first + kLanes <= row.size) logits = load_as<Floats>(row.logits + first);
  else memcpy(&logits, row.logits + first, (row.size - first) * sizeof(float));
  const Floats scaled = (logits - row.highest) * row.inverse_temperature;
  const Floats slack = (scaled < -1e6f ? all(1e6f) : -scaled) * 1e-6f + kSlack;
  Bounds found = {scaled + low - slack, scaled + high + slack};
  const Ints beyond = lane_numbers() >= row.size - first;
  found.low = beyond ? all(-__builtin_inff()) : found.low;
  found.high = beyond ? all(-__builtin_inff()) : found.high;
  return found;
}

}  // namespace

// Writes the ids, ascending, of at most `capacity` tokens that may have the greatest score; returns how many there are, which may be more than were written.
// Logits are finite or -inf, `highest` is their greatest and finite. mask and offset: engine/noise.py's RowKey. `scratch` has room for `size` and 15 more.
extern "C" int32_t tandem_candidates(const float* logits, int32_t size, float highest, float inverse_temperature, uint32_t mask, uint32_t offset,
                                     int32_t capacity, int32_t* ids, float* scratch) {
  const Row row{logits, size, highest, inverse_temperature, mask, offset};
  Floats greatest = all(-__builtin_inff());
  for (int first = 0; first < size; first += kLanes) {
    const Bounds found = bounds(row, first);
    greatest = Max()(found.low, greatest);
    Float32::store(scratch + first, found.high);
  }
  const float least = fold(greatest, Max());
  int32_t count = 0;
  for (int first = 0; first < size; first += kLanes) {
    const Floats high = Float32::load(scratch + first);
    if (fold(high, Max()) < least) continue;
    for (int i = 0; i < kLanes; ++i) {
      if (!(high[i] >= least)) continue;
      if (count < capacity) ids[count] = first + i;
      ++count;
    }
  }
  return count;
}
