// How fast all threads together read memory: the sum of `count` numbers at `from`, and nothing else.
#include <cstddef>
#include <cstdint>

extern "C" std::uint64_t peers_read(const std::uint64_t* from, std::size_t count) {
    std::uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (std::size_t piece = 0; piece < count / 64; ++piece) {
        const std::uint64_t* at = from + piece * 64;
        for (int line = 0; line < 64; line += 8) __builtin_prefetch(at + 512 + line);
        std::uint64_t part = 0;
        for (int index = 0; index < 64; ++index) part += at[index];
        sum += part;
    }
    return sum;
}
