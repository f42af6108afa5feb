// The CPU's matrix unit (AMX): tiles of 16 rows of 64 bytes. Asking the system for it is the caller's part, see engine/kernels/isa.py.
//
// One instruction multiplies up to 16 rows of 32 bfloat16 activations with 32 inputs of 16 outputs and adds to 16 x 16 float32 sums. Its order, for each sum:
// the products of even inputs are one chain, those of odd inputs another, and both chains' ends are added, then added to the sum. A row's bits do not depend on
// how many rows a tile has.
//
// Tiles here: 0 and 1 hold sums of the first rows with two groups of 16 outputs, 2 and 3 those of the second rows; 4 and 5 the two groups of rows; 6 and 7 the
// outputs. The instructions are written out since the compiler's own intrinsics do not tell it that they read and write memory.

#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TANDEM_TILES

#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 16;
constexpr int kTileInputs = 32;
constexpr int kRowsAtOnce = 2 * kTileRows;

#define TILE_LOAD(tile, p, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, p, stride) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::: "memory")
#define TILE_MULTIPLY(sums, rows, outputs) __asm__ volatile("tdpbf16ps %%tmm" #outputs ", %%tmm" #rows ", %%tmm" #sums ::: "memory")

// What the tiles of this thread are shaped for.
struct TileShape {
  int first = 0, second = 0;
};

inline TileShape& tile_shape() {
  static thread_local TileShape shape;
  return shape;
}

// Shapes the tiles for `rows` rows, 1 to 32: up to 16 in the first group, the others in the second.
inline void shape_tiles(int rows) {
  TileShape& shape = tile_shape();
  const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
  if (shape.first == first && (second == 0 || shape.second == second)) return;
  shape.first = first;
  shape.second = second > 0 ? second : kTileRows;
  alignas(64) uint8_t config[64] = {1};  // palette 1; bytes a row at 16, rows at 48
  const int counts[8] = {shape.first, shape.first, shape.second, shape.second, shape.first, shape.second, kTileRows, kTileRows};
  for (int i = 0; i < 8; ++i) {
    config[16 + 2 * i] = 64;
    config[48 + i] = uint8_t(counts[i]);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

// A thread that waits or leaves holds no tiles: they would cost at every change of threads.
inline void release_tiles() {
  tile_shape() = TileShape();
  __asm__ volatile("tilerelease" ::: "memory");
}

// sums[row][32] = rows of x, 1 to 32 as the tiles are shaped, times `num_inputs` inputs of two groups of 16 outputs; added to what is there where kMore. Strides in
// bytes, of rows of x, of pairs of inputs, and of sums. `step()` is called before each of the num_inputs / 32 steps. kSecond: there are more than 16 rows.
template <bool kSecond, bool kMore, typename Step>
inline void multiply_tiles(const uint16_t* x, int64_t x_stride, const uint16_t* first, const uint16_t* second, int64_t pair_stride, int num_inputs,
                           float* sums, int64_t sums_stride, Step step) {
  float* below = sums + sums_stride / 4 * kTileRows;
  if (kMore) {
    TILE_LOAD(0, sums, sums_stride);
    TILE_LOAD(1, sums + kTileRows, sums_stride);
    if (kSecond) {
      TILE_LOAD(2, below, sums_stride);
      TILE_LOAD(3, below + kTileRows, sums_stride);
    }
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (kSecond) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  }
  const int64_t advance = pair_stride / 2 * (kTileInputs / 2);
  const uint16_t* lower = x + x_stride / 2 * kTileRows;
  for (int k = 0; k < num_inputs; k += kTileInputs, first += advance, second += advance) {
    step();
    TILE_LOAD(6, first, pair_stride);
    TILE_LOAD(4, x + k, x_stride);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, second, pair_stride);
    TILE_MULTIPLY(1, 4, 7);
    if (kSecond) {
      TILE_LOAD(5, lower + k, x_stride);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, sums_stride);
  TILE_STORE(1, sums + kTileRows, sums_stride);
  if (kSecond) {
    TILE_STORE(2, below, sums_stride);
    TILE_STORE(3, below + kTileRows, sums_stride);
  }
}

template <bool kMore, typename Step>
inline void multiply_rows_of_tiles(int rows, const uint16_t* x, int64_t x_stride, const uint16_t* first, const uint16_t* second, int64_t pair_stride,
                                   int num_inputs, float* sums, int64_t sums_stride, Step step) {
  shape_tiles(rows);
  if (rows > kTileRows) multiply_tiles<true, kMore>(x, x_stride, first, second, pair_stride, num_inputs, sums, sums_stride, step);
  else multiply_tiles<false, kMore>(x, x_stride, first, second, pair_stride, num_inputs, sums, sums_stride, step);
}

// The same with tiles of 16 rows whatever `rows` is, up to a multiple of 16: so many are read and stored.
inline void multiply_full_tiles(int rows, const uint16_t* x, int64_t x_stride, const uint16_t* first, const uint16_t* second, int64_t pair_stride, int num_inputs,
                                float* sums, int64_t sums_stride) {
  shape_tiles(2 * kTileRows);
  if (rows > kTileRows) multiply_tiles<true, false>(x, x_stride, first, second, pair_stride, num_inputs, sums, sums_stride, [] {});
  else multiply_tiles<false, false>(x, x_stride, first, second, pair_stride, num_inputs, sums, sums_stride, [] {});
}

// sums[4][16 keys][16] = four groups of 16 keys as they lie, `stride` bytes apart, times columns [num_inputs / 2][16].
inline void multiply_keys(const uint16_t* const* keys, int64_t stride, const uint16_t* columns, int num_inputs, float* sums) {
  shape_tiles(2 * kTileRows);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int k = 0; k < num_inputs; k += kTileInputs) {
    TILE_LOAD(6, columns + k * kTileRows, 64);
    TILE_LOAD(4, keys[0] + k, stride);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(5, keys[1] + k, stride);
    TILE_MULTIPLY(1, 5, 6);
    TILE_LOAD(4, keys[2] + k, stride);
    TILE_MULTIPLY(2, 4, 6);
    TILE_LOAD(5, keys[3] + k, stride);
    TILE_MULTIPLY(3, 5, 6);
  }
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + 256, 64);
  TILE_STORE(2, sums + 512, 64);
  TILE_STORE(3, sums + 768, 64);
}

// sums[4][16 rows][16] = 16 rows of x times `num_inputs` inputs of four groups of 16 outputs, which lie one behind the other.
inline void multiply_few_rows(const uint16_t* x, int64_t x_stride, const uint16_t* outputs, int64_t pair_stride, int num_inputs, float* sums) {
  shape_tiles(2 * kTileRows);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int k = 0; k < num_inputs; k += kTileInputs, outputs += pair_stride / 2 * (kTileInputs / 2)) {
    TILE_LOAD(4, x + k, x_stride);
    TILE_LOAD(6, outputs, pair_stride);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, outputs + 2 * kTileRows, pair_stride);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD(6, outputs + 4 * kTileRows, pair_stride);
    TILE_MULTIPLY(2, 4, 6);
    TILE_LOAD(7, outputs + 6 * kTileRows, pair_stride);
    TILE_MULTIPLY(3, 4, 7);
  }
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + 256, 64);
  TILE_STORE(2, sums + 512, 64);
  TILE_STORE(3, sums + 768, 64);
}

#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_MULTIPLY

}  // namespace

#endif
