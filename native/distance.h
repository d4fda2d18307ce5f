// How far apart two cores are. What one has written, the other has to fetch: from a cache that they share, or from farther away.
// On a virtual machine that may change from one minute to the next, and the time of everything that two threads share with it.

#ifdef _OPENMP
#include <omp.h>
#endif

// Two threads hand a line of memory to and fro, `times` times each. Seconds of one way; 0 where there is one thread.
double neighbors_distance(int64_t times) {
  double seconds = 0;
#ifdef _OPENMP
  _Alignas(128) int64_t turn = 0;
#pragma omp parallel num_threads(2)
  if (omp_get_num_threads() == 2) {
    int64_t first = omp_get_thread_num();
    double begun = omp_get_wtime();
    for (int64_t mine = first; mine < 2 * times; mine += 2) {
      while (__atomic_load_n(&turn, __ATOMIC_ACQUIRE) != mine) continue;
      __atomic_store_n(&turn, mine + 1, __ATOMIC_RELEASE);
    }
    if (first == 0) seconds = (omp_get_wtime() - begun) / (2.0 * (double)times);
  }
#else
  (void)times;
#endif
  return seconds;
}
