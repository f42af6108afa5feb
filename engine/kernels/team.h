// A few threads that go through a step together: one call, many phases, a barrier behind each.
//
// Within a step threads wait for each other by spinning for a short while and then asleep: phases take microseconds, and the cores may be shared with
// processes that hold one of us up for milliseconds. Between steps they sleep.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

// A number that grows, and that others wait to see change.
class Epoch {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait_past(uint32_t seen, int num_spins) {
    for (int i = 0; i < num_spins; ++i) {
      if (now() != seen) return;
      pause();
    }
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    while (now() == seen) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }
  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_asleep_{0};
};

class Team {
 public:
  explicit Team(int num_threads) : num_threads_(num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    step_ = nullptr;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const { return num_threads_; }

  // Runs `step(thread)` on every thread, the caller's included; back when all are done. One caller at a time.
  void run(const std::function<void(int)>& step) {
    step_ = &step;
    start_.advance();
    step(0);
    barrier();
  }

  // Until all threads have come here.
  void barrier() {
    if (num_threads_ == 1) return;
    const uint32_t seen = passed_.now();
    if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      num_here_.store(0, std::memory_order_relaxed);
      passed_.advance();
    } else {
      passed_.wait_past(seen, kSpinsInStep);
    }
  }

 private:
  static constexpr int kSpinsInStep = 2000;  // some 50 to 100 microseconds

  void serve(int thread) {
    for (uint32_t seen = 0;;) {
      start_.wait_past(seen, 0);
      seen += 1;
      const std::function<void(int)>* step = step_;
      if (step == nullptr) return;
      (*step)(thread);
      barrier();
    }
  }

  const int num_threads_;
  const std::function<void(int)>* step_ = nullptr;
  Epoch start_, passed_;
  std::atomic<int> num_here_{0};
  std::vector<std::thread> threads_;
};

}  // namespace
