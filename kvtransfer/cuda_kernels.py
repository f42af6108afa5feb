"""The two kernels of a CUDA pool, as CUDA C++ source: gathering blocks by their ids, and the accumulators of their digests."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer import xxh3

VECTOR_BYTES = 16
"""What one thread moves at once: addresses and sizes of blocks are multiples of it."""
GATHER_THREADS = 512
XXH3_THREADS = 64
MAX_VECTORS = 1 << 31
"""Vectors in one gather: indices are of 32 bits, and the last step may pass the end by a grid's width."""


def _words(words: Iterable[int]) -> str:
    return "{" + ", ".join(f"0x{word:016x}ULL" for word in words) + "}"


# Each thread has four loads on their way before its first store: with few CTAs that is what the bandwidth needs.
_GATHER = """
struct __align__(16) Vector { unsigned int word[4]; };

extern "C" __global__ void tandem_gather(const Vector* __restrict__ source, Vector* __restrict__ destination, const unsigned int* __restrict__ ids,
                                         unsigned int num_blocks, unsigned int vectors) {
  // ids: of the source's blocks, and behind them of the destination's.
  const unsigned int total = num_blocks * vectors, step = gridDim.x * blockDim.x;
  for (unsigned int start = blockIdx.x * blockDim.x + threadIdx.x; start < total; start += 4 * step) {
    Vector moved[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned int i = start + k * step;
      if (i < total) {
        const unsigned int block = i / vectors;
        moved[k] = source[(unsigned long long)ids[block] * vectors + (i - block * vectors)];
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned int i = start + k * step;
      if (i < total) {
        const unsigned int block = i / vectors;
        destination[(unsigned long long)ids[num_blocks + block] * vectors + (i - block * vectors)] = moved[k];
      }
    }
  }
}
"""

# One thread for each accumulator of each block: lane n takes its own word of a stripe and its neighbour's, so that no thread needs another.
_XXH3 = f"""
__device__ const unsigned long long SECRET[24] = {_words(xxh3.SECRET_WORDS)};
__device__ const unsigned long long LAST[8] = {_words(xxh3.LAST_WORDS)};
__device__ const unsigned long long START[8] = {_words(xxh3.START)};

extern "C" __global__ void tandem_xxh3(const unsigned long long* __restrict__ blocks, const unsigned int* __restrict__ ids,
                                       unsigned long long* __restrict__ accumulators, unsigned int num_blocks, unsigned long long words) {{
  const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % {xxh3.NUM_ACCUMULATORS}, row = thread / {xxh3.NUM_ACCUMULATORS};
  if (row >= num_blocks) return;
  const unsigned long long* block = blocks + (unsigned long long)ids[row] * words;
  unsigned long long sum = START[lane];
  const unsigned long long stripes = (words * 8 - 1) / {xxh3.STRIPE_BYTES};
  for (unsigned long long first = 0; first < stripes; first += {xxh3.STRIPES_PER_ROUND}) {{
#pragma unroll
    for (int k = 0; k < {xxh3.STRIPES_PER_ROUND}; ++k) {{
      if (first + k < stripes) {{
        const unsigned long long* stripe = block + (first + k) * 8;
        const unsigned long long keyed = stripe[lane] ^ SECRET[k + lane];
        sum += stripe[lane ^ 1] + (keyed & 0xffffffffULL) * (keyed >> 32);
      }}
    }}
    if (first + {xxh3.STRIPES_PER_ROUND} <= stripes) sum = (sum ^ (sum >> 47) ^ SECRET[16 + lane]) * {xxh3.PRIME32_1:#x}ULL;
  }}
  const unsigned long long* last = block + words - 8;
  const unsigned long long keyed = last[lane] ^ LAST[lane];
  accumulators[(unsigned long long)row * {xxh3.NUM_ACCUMULATORS} + lane] = sum + last[lane ^ 1] + (keyed & 0xffffffffULL) * (keyed >> 32);
}}
"""

SOURCE = _GATHER + _XXH3
