// What all the code here is made of: vectors of floats, what a call is handed, who works on which part, and tiles of scores.
// Vectors are those of GCC and Clang, for any processor.
#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
enum { W = 16, R = 8, C = 3 };  // floats in a vector; a tile of scores is R rows x C vectors, all of whose sums stay in registers
#elif defined(__AVX__)
enum { W = 8, R = 4, C = 3 };
#else
enum { W = 4, R = 4, C = 3 };
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef float vec_at __attribute__((vector_size(4 * W), aligned(4), may_alias));  // at any address
typedef int32_t ivec_at __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t eight __attribute__((vector_size(32), aligned(4), may_alias));  // for lists: see `of_lists`
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec x) { *(vec_at *)p = x; }
INLINE ivec keys_at(const int32_t *p) { return *(const ivec_at *)p; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t whole(int64_t n) { return (n + W - 1) / W * W; }  // the next multiple of a vector
// Written lane by lane, compilers find the one instruction for it.
INLINE ivec larger(ivec x, ivec y) {
  ivec z;
  _Pragma("GCC unroll 16") for (int l = 0; l < W; l++) z[l] = x[l] > y[l] ? x[l] : y[l];
  return z;
}

INLINE ivec lanes(void) {
  ivec x;
  for (int l = 0; l < W; l++) x[l] = l;
  return x;
}

// Half of the work each time: lane l meets lane l ^ step.
#define FOLD(x, operation)                                   \
  _Pragma("GCC unroll 4") for (int step = sizeof(x) / 8; step; step /= 2) { \
    __typeof__(x) other;                                     \
    _Pragma("GCC unroll 16") for (int l = 0; l < (int)sizeof(x) / 4; l++) other[l] = x[l ^ step]; \
    x = operation;                                           \
  }
INLINE float sum(vec x) {
  FOLD(x, x + other)
  return x[0];
}
INLINE vec greater(vec x, vec y) {
  ivec first = x > y;
  return (vec)((first & (ivec)x) | (~first & (ivec)y));
}

INLINE float greatest(vec x) {
  FOLD(x, greater(x, other))
  return x[0];
}
INLINE eight larger_of_eight(eight x, eight y) {
  eight first = x > y;
  return (first & x) | (~first & y);
}
INLINE int32_t largest(eight x) {
  FOLD(x, larger_of_eight(x, other))
  return x[0];
}
INLINE uint32_t any_bit(ivec x) {
  FOLD(x, (x | other))
  return (uint32_t)x[0];
}
INLINE uint32_t any_bit_of_eight(eight x) {
  FOLD(x, (x | other))
  return (uint32_t)x[0];
}

// ---------------------------------------------------------------- what a call is handed, and who works on which part

typedef struct {
  float *data;
  int64_t image, head, row;  // floats from one to the next; channels lie side by side
} View;                      // (B, H, rows, D)

typedef struct {
  View rows, columns, out;  // what belongs to the N rows, to the M columns, and what is made of them: D channels
  View values, grad;        // of an attention: what is summed (M), and the gradient of the sums (N): E channels
  View d_rows, d_columns, d_values;
  const int64_t *index;     // (B H, N, K): which columns; the same (N, K) for all groups where `lists` is 0
  const float *weight;      // (B H, N, K)
  const float *factor;      // (K, D) for each rank and channel, or none: 1
  const float *matrix;      // (F, K E), a matrix for each rank, which makes F channels of E; for gradients (K E, F)
  const float *turned;      // (B H, F, N), the gradient with its channels first
  float *panel, *d_matrix;  // the matrix packed; its gradient (F, K E)
  float *d_blocks;          // gradients of the weights, a sum for each block of channels (blocks, B H, N, K)
  const float *bias;        // (N, K), added to scaled scores; or none
  const float *keep;        // (B H, N, K): what dropout multiplies weights by; or none
  const float *first;       // the scaled score of rank 0, whatever its product; or none
  const int64_t *among;     // (A): the columns that are selected from; or none: all
  const int64_t *own;       // (N): where the row itself is among them, or -1: it must not select itself; or none
  const int64_t *places;    // (H, N, S): of the columns outside a row's list, those that follow it; the same for all images; or none
  float *score, *kept;      // (B H, N, K), written: scores or weights; weights after dropout
  int64_t *chosen;          // (B H, N, K), written
  int64_t B, H, N, M, D, E, F, K, A, S, lists, threads;
  float scale;
} Call;

typedef int Work(const Call *, int64_t group, int64_t first, int64_t last, float *scratch);

// Calls `work` for all rows (or channels) of all groups. Each thread takes one stretch of them, as torch's operators do around it: what a core
// has just written is near it, and cores of some machines share no cache. A stretch may end within a group, after a whole number of `unit`s;
// what is computed does not depend on where.
static int64_t shared_by(Work *work, const Call *c, int64_t groups, int64_t total, int64_t unit, int64_t scratch) {
  int64_t units = (total + unit - 1) / unit, all = groups * units, wrong = 0;
#pragma omp parallel for schedule(static) num_threads(c->threads) if (c->threads > 1) reduction(+ : wrong)
  for (int64_t t = 0; t < c->threads; t++) {
    int64_t at = all * t / c->threads, end = all * (t + 1) / c->threads;
    float *own = at < end ? malloc((scratch + 16) * sizeof(float)) : NULL;
    wrong += at < end && own == NULL;
    for (int64_t next; own && at < end; at = next) {
      int64_t g = at / units, begin = g * units;
      next = least(begin + units, end);
      wrong += work(c, g, (at - begin) * unit, least((next - begin) * unit, total), own);
    }
    free(own);
  }
  return wrong;
}

static int64_t shared(Work *work, const Call *c, int64_t total, int64_t unit, int64_t scratch) {
  return shared_by(work, c, c->B * c->H, total, unit, scratch);
}

INLINE float *group(View x, const Call *c, int64_t g) { return x.data + g / c->H * x.image + g % c->H * x.head; }

INLINE const int64_t *list_of(const Call *c, int64_t g, int64_t n) { return c->index + g * c->lists + n * c->K; }

// Whether a row's list points outside of the columns.
INLINE int outside(const int64_t *index, int64_t K, int64_t M) {
  int bad = 0;
  for (int64_t r = 0; r < K; r++) bad |= (uint64_t)index[r] >= (uint64_t)M;
  return bad;
}

// ---------------------------------------------------------------- scores

// Lane l of what is made is lane which[l] of a, or from W on of b.
INLINE vec pick(vec a, vec b, ivec which) {
#ifdef __clang__
  vec x;
  _Pragma("GCC unroll 16") for (int l = 0; l < W; l++) x[l] = which[l] < W ? a[which[l]] : b[which[l] - W];
  return x;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

// W channels of W columns, to a row for each channel. As cards are shuffled: one column of the first half, one of the second, in turn; when
// that was done as many times as W can be halved, what stood below each other stands side by side.
INLINE void turn(float *to, int64_t width, const float *const *from) {
  vec x[W], y[W];
  ivec low = lanes() / 2 + lanes() % 2 * W, high = low + W / 2;
  _Pragma("GCC unroll 16") for (int i = 0; i < W; i++) x[i] = load(from[i]);
  _Pragma("GCC unroll 4") for (int step = 1; step < W; step *= 2) {
    _Pragma("GCC unroll 16") for (int i = 0; i < W; i++) y[i] = pick(x[i / 2], x[(i + W) / 2], i % 2 ? high : low);
    _Pragma("GCC unroll 16") for (int i = 0; i < W; i++) x[i] = y[i];
  }
  _Pragma("GCC unroll 16") for (int i = 0; i < W; i++) store(to + i * width, x[i]);
}

// M columns (those that `which` names, or none: all) to panels of C vectors of columns (the last one narrower), each panel (D, width): what
// a tile reads lies side by side.
static void pack(float *panel, const float *x, int64_t row, const int64_t *which, int64_t M, int64_t D) {
  for (int64_t j = 0; j < whole(M); j += C * W) {
    int64_t width = least(C * W, whole(M) - j);
    for (int64_t c = 0; c < width; c += W) {  // a vector of columns at once, the last one again where there are fewer
      const float *from[W];
      float *to = panel + j * D + c;
      for (int i = 0; i < W; i++) {
        int64_t column = least(j + c + i, M - 1);
        from[i] = x + (which ? which[column] : column) * row;
      }
      int64_t d = 0;
      for (; d + W <= D; d += W) {
        turn(to + d * width, width, from);
        for (int i = 0; i < W; i++) from[i] += W;
      }
      for (; d < D; d++)
        for (int i = 0; i < W; i++) to[d * width + i] = *from[i]++;
    }
  }
}

INLINE void tile(int vectors, float *s, int64_t ld, const float *panel, const float *const *row, int64_t D) {
  vec total[R][C];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < vectors; v++) total[r][v] = (vec){0};
  for (int64_t d = 0; d < D; d++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < vectors; v++) total[r][v] += row[r][d] * load(panel + (d * vectors + v) * W);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < vectors; v++) store(s + r * ld + v * W, total[r][v]);
}

// Dot products of R rows with all columns: s[r][j].
static void scores(float *s, const float *panel, const float *const *row, int64_t M, int64_t D) {
  int64_t ld = whole(M);
  for (int64_t j = 0; j < ld; j += C * W) {
    switch (least(C, (ld - j) / W)) {
      case 1: tile(1, s + j, ld, panel + j * D, row, D); break;
      case 2: tile(2, s + j, ld, panel + j * D, row, D); break;
      default: tile(C, s + j, ld, panel + j * D, row, D);
    }
  }
}

// The sum over channels of x factor y; factor or none: 1.
INLINE float dot(const float *x, const float *factor, const float *y, int64_t D) {
  vec total = {0};
  float rest = 0;
  int64_t d = 0;
  for (; d + W <= D; d += W) total += (factor ? load(factor + d) * load(x + d) : load(x + d)) * load(y + d);
  for (; d < D; d++) rest += x[d] * (factor ? factor[d] : 1) * y[d];
  return sum(total) + rest;
}
