// Copies blocks between two pools in one call. See block_copy.py.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kMaxRunBytes = 256 << 10;  // A stop is looked at this often, or once a block.

#if defined(__AVX2__)
constexpr int64_t kStepBytes = 256;
constexpr int64_t kAheadBytes = 1024;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kMinStreamedBytes = 1 << 20;  // Less than this is wanted in the cache, where memcpy leaves it.

bool can_stream(const uint8_t* to, int64_t block_bytes, int64_t num_blocks) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(__m256i) == 0 && block_bytes % kStepBytes == 0;
  return aligned && block_bytes >= 2 * kAheadBytes && block_bytes * num_blocks >= kMinStreamedBytes;
}

// Past the caches: what was copied is not read soon, so its lines need not be fetched first, and what the batch works on stays.
// `next` is read after this block: the processor's own prefetching starts anew with every page, and so at every block.
void stream_block(uint8_t* to, const uint8_t* from, int64_t block_bytes, const uint8_t* next) {
  for (int64_t at = 0; at < block_bytes; at += kStepBytes) {
    const int64_t ahead = at + kAheadBytes;
    const uint8_t* wanted = ahead < block_bytes ? from + ahead : next + (ahead - block_bytes);
    for (int64_t line = 0; line < kStepBytes; line += kLineBytes) _mm_prefetch(reinterpret_cast<const char*>(wanted + line), _MM_HINT_NTA);
#pragma GCC unroll 8
    for (int64_t lane = 0; lane < kStepBytes; lane += sizeof(__m256i)) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + lane));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + lane), value);
    }
  }
}
#endif

// Blocks from `index` on that are neighbours on both sides, at most kMaxRunBytes of them.
int64_t run_length(const int64_t* to_ids, const int64_t* from_ids, int64_t index, int64_t num_blocks, int64_t block_bytes) {
  const int64_t limit = std::min(num_blocks - index, std::max<int64_t>(kMaxRunBytes / block_bytes, 1));
  int64_t length = 1;
  while (length < limit && from_ids[index + length] == from_ids[index] + length && to_ids[index + length] == to_ids[index] + length) ++length;
  return length;
}

}  // namespace

// Returns how many blocks were copied: fewer than num_blocks once *stop is set. No load of a block is done after the call.
extern "C" int64_t tandem_copy_blocks(uint8_t* to, const int64_t* to_ids, const uint8_t* from, const int64_t* from_ids, int64_t num_blocks,
                                      int64_t block_bytes, const int32_t* stop) {
#if defined(__AVX2__)
  const bool streams = can_stream(to, block_bytes, num_blocks);
#endif
  int64_t index = 0;
  while (index < num_blocks && !__atomic_load_n(stop, __ATOMIC_RELAXED)) {
#if defined(__AVX2__)
    if (streams) {
      const int64_t next = std::min(index + 1, num_blocks - 1);
      stream_block(to + to_ids[index] * block_bytes, from + from_ids[index] * block_bytes, block_bytes, from + from_ids[next] * block_bytes);
      ++index;
      continue;
    }
#endif
    const int64_t length = run_length(to_ids, from_ids, index, num_blocks, block_bytes);
    std::memcpy(to + to_ids[index] * block_bytes, from + from_ids[index] * block_bytes, length * block_bytes);
    index += length;
  }
#if defined(__AVX2__)
  if (streams) _mm_sfence();
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return index;
}
