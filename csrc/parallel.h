// Threads for the kernels.
//
// A small pool instead of OpenMP, because OpenMP's threads spin after each region and its runtime
// may hang in a forked child. Ours sleep when idle, take work from several callers at once, and are
// started anew after a fork.
#pragma once

#include <cstdint>

namespace fakequant {

// Threads used by one call, the caller included; 64 at most. The default is the number of CPUs this
// process may run on.
int get_num_threads();
void set_num_threads(int n);

// Calls body(task) for every task in [0, tasks) and returns when all are done. Tasks must not depend
// on each other.
void run_tasks(int64_t tasks, void (*body)(void* context, int64_t task), void* context);

template <class F> void run_tasks(int64_t tasks, F&& body) {
  run_tasks(tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &body);
}

}  // namespace fakequant
