// Threads for the kernels.
//
// A small pool instead of OpenMP, because OpenMP's threads spin after each region and its runtime
// may hang in a forked child. Ours sleep when idle, take work from several callers at once, and are
// started anew after a fork. On the data of torch the kernels run on torch's threads instead, because
// those spin between regions and two pools would take the CPUs from each other.
#pragma once

#include <cstdint>

namespace fakequant {

// Threads used by one call, the caller included; 64 at most. The default is the number of CPUs this
// process may run on.
int get_num_threads();
void set_num_threads(int n);

// A parallel loop of another library: calls f(begin, end, context) for parts of [begin, end) on its
// own threads. Both return 0 on success. These are the C signatures of torch's stable interface.
struct Borrowed {
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*f)(int64_t, int64_t, void*), void* context);
  int32_t (*num_threads)(uint32_t* n);
};

void lend_threads(const Borrowed& from);

// While it exists and `yes`, this thread's calls run on the lent threads, if there are any: as many as
// their owner uses, but no more than get_num_threads(). A forked child goes back to the own pool.
class BorrowThreads {
 public:
  explicit BorrowThreads(bool yes);
  ~BorrowThreads();
  BorrowThreads(const BorrowThreads&) = delete;
  BorrowThreads& operator=(const BorrowThreads&) = delete;

 private:
  bool before_;
};

// Calls body(task) for every task in [0, tasks) and returns when all are done. Tasks must not depend
// on each other.
void run_tasks(int64_t tasks, void (*body)(void* context, int64_t task), void* context);

template <class F> void run_tasks(int64_t tasks, F&& body) {
  run_tasks(tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &body);
}

}  // namespace fakequant
