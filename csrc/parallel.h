// Threads for the kernels.
//
// A small pool instead of OpenMP, because OpenMP's threads spin after each parallel region and its runtime may hang
// in a forked child. The threads of this pool sleep when idle, serve several callers at once, and are restarted after
// a fork. Calls on torch tensors run on torch's threads instead: those spin between regions, and two pools would
// compete for the CPUs.
#pragma once

#include <cstdint>

namespace fakequant {

// Maximum number of threads used by one call, including the caller; 1 to 64. The default is the number of CPUs this
// process may run on.
int get_num_threads();
void set_num_threads(int n);

// The parallel loop of another library. `parallel_for` calls f(begin, end, context) for parts of [begin, end) on that
// library's threads. Both functions return 0 on success. These are the C signatures of torch's stable interface.
struct Borrowed {
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*f)(int64_t, int64_t, void*), void* context);
  int32_t (*num_threads)(uint32_t* n);
};

// Sets the threads that BorrowThreads uses.
void lend_threads(const Borrowed& from);

// While an instance with `yes` exists, calls of this thread run on the lent threads if there are any: at most as many
// as their owner uses, and at most get_num_threads(). A forked child uses the pool again.
class BorrowThreads {
 public:
  explicit BorrowThreads(bool yes);
  ~BorrowThreads();
  BorrowThreads(const BorrowThreads&) = delete;
  BorrowThreads& operator=(const BorrowThreads&) = delete;

 private:
  bool before_;
};

// Calls body(task) for every task in [0, tasks), in any order and on several threads. Returns when all are done. The
// body must not throw.
void run_tasks(int64_t tasks, void (*body)(void* context, int64_t task), void* context);

template <class F> void run_tasks(int64_t tasks, F&& body) {
  run_tasks(tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &body);
}

}  // namespace fakequant
