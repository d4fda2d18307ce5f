// Lists of neighbors on a CPU: which K columns have the largest dot products with a row, and sums over such lists.
//
// A group is one head of one image: N rows (queries), M columns (keys, values), D channels, float32. Scores are made a few rows at a time
// in registers and selected from while they are in the cache; no N x M and no N x K x D numbers are ever stored.
// Vectors are those of GCC and Clang, for any processor. Python checks that memory is of the right sizes (native/__init__.py).
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
typedef float vec_at __attribute__((vector_size(4 * W), aligned(4), may_alias));  // at any address
typedef int32_t ivec_at __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t eight __attribute__((vector_size(32), aligned(4), may_alias));
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

INLINE ivec smaller(ivec x, ivec y) {
  ivec z;
  _Pragma("GCC unroll 16") for (int l = 0; l < W; l++) z[l] = x[l] < y[l] ? x[l] : y[l];
  return z;
}

INLINE ivec lanes(void) {
  ivec x;
  for (int l = 0; l < W; l++) x[l] = l;
  return x;
}

// Half of the work each time: lane l meets lane l ^ step.
#define FOLD(x, operation)                                   \
  _Pragma("GCC unroll 4") for (int step = W / 2; step; step /= 2) { \
    __typeof__(x) other;                                     \
    _Pragma("GCC unroll 16") for (int l = 0; l < W; l++) other[l] = x[l ^ step]; \
    x = operation;                                           \
  }
INLINE float sum(vec x) {
  FOLD(x, x + other)
  return x[0];
}
INLINE int32_t largest(ivec x) {
  FOLD(x, larger(x, other))
  return x[0];
}
INLINE uint32_t any_bit(ivec x) {
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
  const float *bias;        // (N, K), added to scaled scores; or none
  const float *keep;        // (B H, N, K): what dropout multiplies weights by; or none
  const float *first;       // the scaled score of rank 0, whatever its product; or none
  const int64_t *own;       // (N): the column that is the row itself, which it must not select, or -1; or none
  float *score, *kept;      // (B H, N, K), written: scores or weights; weights after dropout
  int64_t *chosen;          // (B H, N, K), written
  int64_t B, H, N, M, D, E, F, K, lists, threads;
  float scale;
} Call;

typedef int Work(const Call *, int64_t group, int64_t first, int64_t last, float *scratch);

// Calls `work` for each group and for `total` rows (or channels), in pieces that depend on nothing but sizes. A thread takes whole images
// where there are enough of them: heads of one image share lines of the cache. Where groups are few, each is cut in parts of `unit`s.
static int64_t shared_by(Work *work, const Call *c, int64_t groups, int64_t together, int64_t total, int64_t unit, int64_t scratch) {
  int64_t units = (total + unit - 1) / unit;
  int64_t parts = least(groups >= c->threads ? 1 : (c->threads + groups - 1) / groups, units), pieces = groups / together * parts;
  int64_t wrong = 0;
#pragma omp parallel num_threads(c->threads) if (c->threads > 1) reduction(+ : wrong)
  {
    float *own = malloc((scratch + 16) * sizeof(float));
    wrong += own == NULL;
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < pieces; p++) {
      int64_t part = p % parts, first = units * part / parts * unit, last = least(units * (part + 1) / parts * unit, total);
      for (int64_t g = p / parts * together; own && g < (p / parts + 1) * together; g++) wrong += work(c, g, first, last, own);
    }
    free(own);
  }
  return wrong;
}

static int64_t shared(Work *work, const Call *c, int64_t total, int64_t unit, int64_t scratch) {
  return shared_by(work, c, c->B * c->H, c->B >= c->threads ? c->H : 1, total, unit, scratch);
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

// Columns to panels of C vectors of columns (the last one narrower), each panel (D, width): what a tile reads lies side by side.
static void pack(float *panel, const float *x, int64_t row, int64_t M, int64_t D) {
  for (int64_t j = 0; j < whole(M); j += C * W) {
    int64_t width = least(C * W, whole(M) - j);
    for (int64_t c = 0; c < width; c += W) {  // a vector of columns at once, the last one again where there are fewer
      const float *from[W];
      float *to = panel + j * D + c;
      for (int i = 0; i < W; i++) from[i] = x + least(j + c + i, M - 1) * row;
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

// ---------------------------------------------------------------- the K best of a row

// Floats to whole numbers of the same order (and back: it is its own inverse). Numbers that are none come out above infinity, all below
// the largest whole number, so that 1 can be added.
INLINE ivec ordered(ivec bits) { return smaller(bits ^ (bits >> 31 & 0x7FFFFFFF), (ivec){0} + (INT32_MAX - 1)); }

// A key that at least K of the columns reach, and few others. Columns are dealt to whole(K) lanes; the K-th largest of the lanes' maxima
// is reached by K lanes at least. `lane` has room for whole(K) keys.
static int32_t bound(const int32_t *key, int64_t ld, int64_t K, int32_t *lane) {
  int64_t count = whole(K);
  for (int64_t l = 0; l < count; l += W) {
    ivec top = keys_at(key + l);
    for (int64_t j = l + count; j < ld; j += count) top = larger(top, keys_at(key + j));
    *(ivec_at *)(lane + l) = top;
  }
  ivec reached = (ivec){0} + INT32_MIN;
  for (int64_t l = 0; l < count; l += W) {
    ivec x = keys_at(lane + l), as_large = {0};
    for (int64_t j = 0; j < count; j++) as_large -= lane[j] >= x;  // true is -1
    ivec enough = as_large >= (int32_t)K;
    reached = larger(reached, (enough & x) | (~enough & INT32_MIN));
  }
  return largest(reached);
}

// The places of the bits of each byte, in their order.
static int32_t places[256][8];
__attribute__((constructor)) static void list_places(void) {
  for (int byte = 0; byte < 256; byte++)
    for (int bit = 0, count = 0; bit < 8; bit++)
      if (byte >> bit & 1) places[byte][count++] = bit;
}

// Columns whose key is at least `least_key`, in their order, filled up to whole vectors with `ld`, where no column is; how many columns.
// No branch hangs on a key (one in six would be guessed wrong), and a loop ends at a whole vector: its end is guessed right, mostly.
static int64_t reaching(const int32_t *key, int64_t ld, int32_t least_key, int32_t *column) {
  int64_t count = 0;
  for (int64_t j = 0; j < ld; j += 32) {
    ivec found = {0};  // a bit for each of 32 columns
    for (int64_t i = 0; i < 32 && j + i < ld; i += W) found |= (keys_at(key + j + i) >= least_key) & (1 << (lanes() + (int32_t)i));
    uint32_t bits = any_bit(found);
    for (int i = 0; bits && i < 4; i++) {
      uint32_t byte = bits >> 8 * i & 255;
      *(eight *)(column + count) = *(const eight *)places[byte] + (int32_t)(j + 8 * i);
      count += __builtin_popcount(byte);
    }
  }
  *(ivec_at *)(column + count) = (ivec){0} + (int32_t)ld;
  return count;
}

// The K best of `count` columns, best first and equals in their order: `best` and its keys. `x` has room for whole(count) keys.
static void rank(const int32_t *key, const int32_t *column, int64_t count, int64_t K, int32_t *x, int32_t *best, int32_t *best_key) {
  if (count > 2 * K + 4 * W) {  // many are equal: into a short list, one after the other
    int64_t have = 0;
    for (int64_t i = 0; i < count; i++) {
      int32_t y = key[column[i]];
      if (have == K && y <= best_key[K - 1]) continue;
      int64_t p = have < K ? have++ : K - 1;
      for (; p && best_key[p - 1] < y; p--) best_key[p] = best_key[p - 1], best[p] = best[p - 1];
      best_key[p] = y, best[p] = column[i];
    }
    return;
  }
  int64_t all = whole(count);
  for (int64_t i = 0; i < all; i++) x[i] = key[column[i]];
  for (int64_t i = 0; i < all; i += W) {  // the place of each: how many are larger, or equal and before it
    ivec y = keys_at(x + i), me = lanes() + (int32_t)i, place = {0};
    for (int64_t j = 0; j < all; j++) place -= x[j] - ((int32_t)j < me) > y;  // true is -1: an equal one that is before is larger by 1
    for (int64_t l = 0; l < W; l++) best[place[l]] = column[i + l], best_key[place[l]] = x[i + l];
  }
}

static int nearest_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  int64_t M = c->M, D = c->D, K = c->K, ld = whole(M);
  float *panel = scratch, *s = panel + ld * D;
  int32_t *key = (int32_t *)(s + R * ld), *x = key + ld + 32, *column = x + ld, *best = column + ld + 32, *best_key = best + ld, *lane = best_key + ld;
  const float *rows = group(c->rows, c, g), *at[R];
  pack(panel, group(c->columns, c, g), c->columns.row, M, D);
  for (int64_t j = ld; j < ld + 32; j++) key[j] = INT32_MIN;
  for (int64_t n = first; n < last; n += R) {
    for (int r = 0; r < R; r++) at[r] = rows + least(n + r, last - 1) * c->rows.row;
    scores(s, panel, at, M, D);
    for (int64_t r = 0; r < R && n + r < last; r++) {
      for (int64_t j = 0; j < ld; j += W) *(ivec_at *)(key + j) = ordered((ivec)load(s + r * ld + j));
      for (int64_t j = M; j < ld; j++) key[j] = INT32_MIN;  // no column; and after all that are
      if (c->own && c->own[n + r] >= 0) key[c->own[n + r]] = (int32_t)0xFF800000 ^ 0x7FFFFFFF;  // minus infinity
      rank(key, column, reaching(key, ld, bound(key, ld, K, lane), column), K, x, best, best_key);
      int64_t to = (g * c->N + n + r) * K;
      for (int64_t i = 0; i < K; i++) {
        int32_t bits = best_key[i] ^ (best_key[i] >> 31 & 0x7FFFFFFF);
        __builtin_memcpy(c->score + to + i, &bits, 4);
        c->chosen[to + i] = best[i];
      }
    }
  }
  return 0;
}

// ---------------------------------------------------------------- the K best of very many columns

enum { CHUNK = 8 * C * W };  // columns at a time: in panels, they stay in the cache while all rows pass

// Columns b to b + ld, with scores s + more, into a row's list of K: best first, equals in their order. Whatever does not beat the last one
// of the list is dismissed, 32 columns at once, and that is nearly all.
INLINE void keep(const float *s, const float *more, int64_t b, int64_t ld, int64_t K, float *score, int64_t *chosen) {
  for (int64_t j = 0; j < ld; j += 32) {
    ivec found = {0};
    for (int64_t i = j; i < j + 32 && i < ld; i += W) {
      found |= (load(s + i) + load(more + i) > score[K - 1]) & (1 << (lanes() + (int32_t)(i - j)));
    }
    for (uint32_t bits = any_bit(found); bits; bits &= bits - 1) {
      int64_t i = j + __builtin_ctz(bits), p = K - 1;
      float x = s[i] + more[i];
      if (!(x > score[p])) continue;  // by now the list is better
      for (; p && score[p - 1] < x; p--) score[p] = score[p - 1], chosen[p] = chosen[p - 1];
      score[p] = x, chosen[p] = b + i;
    }
  }
}

// score and chosen: for each row its K largest of dot product + factor (M), best first, equals by column. NaN and minus infinity are never
// among them; -1 where there are fewer. A product is one sum over channels in their order: Python counts on no more than D roundings.
static int scan_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  int64_t M = c->M, D = c->D, K = c->K, *chosen = c->chosen + g * c->N * K;
  float *panel = scratch, *s = panel + CHUNK * D, *more = s + R * CHUNK, *score = c->score + g * c->N * K;
  const float *rows = group(c->rows, c, g), *columns = group(c->columns, c, g), *at[R];
  for (int64_t i = first * K; i < last * K; i++) score[i] = -__builtin_inff(), chosen[i] = -1;
  for (int64_t b = 0; b < M; b += CHUNK) {
    int64_t count = least(CHUNK, M - b), ld = whole(count);
    pack(panel, columns + b * c->columns.row, c->columns.row, count, D);
    for (int64_t j = 0; j < ld; j++) more[j] = j >= count ? -__builtin_inff() : c->factor ? c->factor[b + j] : 0;
    for (int64_t n = first; n < last; n += R) {
      for (int r = 0; r < R; r++) at[r] = rows + least(n + r, last - 1) * c->rows.row;
      scores(s, panel, at, count, D);
      for (int64_t r = 0, i = n * K; r < least(R, last - n); r++, i += K) keep(s + r * ld, more, b, ld, K, score + i, chosen + i);
    }
  }
  return 0;
}

// ---------------------------------------------------------------- sums over neighbors

// out[n] = sum over r of weight[n, r] factor[r] columns[index[n, r]], `vectors` vectors of channels from channel d on.
INLINE void gather(int vectors, const Call *c, float *out, const float *columns, const int64_t *index, const float *weight, int64_t d) {
  vec total[4];
  for (int v = 0; v < vectors; v++) total[v] = (vec){0};
  for (int64_t r = 0; r < c->K; r++) {
    const float *from = columns + index[r] * c->columns.row + d;
    for (int v = 0; v < vectors; v++) {
      vec w = (vec){0} + weight[r];
      if (c->factor) w *= load(c->factor + r * c->D + d + v * W);
      total[v] += w * load(from + v * W);
    }
  }
  for (int v = 0; v < vectors; v++) store(out + d + v * W, total[v]);
}

static int bag_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  (void)scratch;
  int64_t D = c->D, K = c->K;
  const float *columns = group(c->columns, c, g);
  for (int64_t n = first; n < last; n++) {
    const int64_t *index = list_of(c, g, n);
    const float *weight = c->weight + (g * c->N + n) * K;
    float *out = group(c->out, c, g) + n * c->out.row;
    if (outside(index, K, c->M)) return 1;
    int64_t d = 0;
    for (; d + 4 * W <= D; d += 4 * W) gather(4, c, out, columns, index, weight, d);
    for (; d + W <= D; d += W) gather(1, c, out, columns, index, weight, d);
    for (; d < D; d++) {
      out[d] = 0;
      for (int64_t r = 0; r < K; r++) out[d] += weight[r] * (c->factor ? c->factor[r * D + d] : 1) * columns[index[r] * c->columns.row + d];
    }
  }
  return 0;
}

// out[index[n, r]] += weight[n, r] factor[r] rows[n], for channels first to last. `out` holds zeros before.
static int spread_channels(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  (void)scratch;
  int64_t D = c->D, K = c->K;
  for (int64_t n = 0; n < c->N; n++) {
    const int64_t *index = list_of(c, g, n);
    const float *weight = c->weight + (g * c->N + n) * K, *row = group(c->rows, c, g) + n * c->rows.row;
    if (outside(index, K, c->M)) return 1;
    for (int64_t r = 0; r < K; r++) {
      float *to = group(c->out, c, g) + index[r] * c->out.row;
      const float *factor = c->factor ? c->factor + r * D : NULL;
      int64_t d = first;
      for (; d + W <= last; d += W) {
        vec w = (vec){0} + weight[r];
        if (factor) w *= load(factor + d);
        store(to + d, load(to + d) + w * load(row + d));
      }
      for (; d < last; d++) to[d] += weight[r] * (factor ? factor[d] : 1) * row[d];
    }
  }
  return 0;
}

// score[n, r] = sum over channels of rows[n] factor[r] columns[index[n, r]].
static int dot_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  (void)scratch;
  int64_t D = c->D, K = c->K;
  const float *columns = group(c->columns, c, g);
  for (int64_t n = first; n < last; n++) {
    const int64_t *index = list_of(c, g, n);
    const float *row = group(c->rows, c, g) + n * c->rows.row;
    if (outside(index, K, c->M)) return 1;
    for (int64_t r = 0; r < K; r++) {
      const float *from = columns + index[r] * c->columns.row, *factor = c->factor ? c->factor + r * D : NULL;
      vec total = {0};
      int64_t d = 0;
      for (; d + W <= D; d += W) total += (factor ? load(factor + d) * load(row + d) : load(row + d)) * load(from + d);
      float rest = 0;
      for (; d < D; d++) rest += row[d] * (factor ? factor[d] : 1) * from[d];
      c->score[(g * c->N + n) * K + r] = sum(total) + rest;
    }
  }
  return 0;
}

// score[g, r] (B H, K, D) = sum over rows n of weight[n, r] rows[n] columns[index[n, r]], for channels first to last. It holds zeros before.
// One for each group, to be added up in their order: not one a thread, whose sums would depend on who took which group.
static int factor_channels(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  (void)scratch;
  int64_t D = c->D, K = c->K;
  const float *columns = group(c->columns, c, g);
  for (int64_t n = 0; n < c->N; n++) {
    const int64_t *index = list_of(c, g, n);
    const float *weight = c->weight + (g * c->N + n) * K, *row = group(c->rows, c, g) + n * c->rows.row;
    if (outside(index, K, c->M)) return 1;
    for (int64_t r = 0; r < K; r++) {
      const float *from = columns + index[r] * c->columns.row;
      float *to = c->score + (g * K + r) * D;
      int64_t d = first;
      for (; d + W <= last; d += W) store(to + d, load(to + d) + weight[r] * load(row + d) * load(from + d));
      for (; d < last; d++) to[d] += weight[r] * row[d] * from[d];
    }
  }
  return 0;
}

// ---------------------------------------------------------------- softmax over the K of a list

// e to the x, for x of at most 0: 2^n 2^f with n whole and f at most 1/2 either way, 2^f by its series. Relative error 2e-7.
INLINE vec exponential(vec x) {
  vec y = x * 1.44269504f;
  ivec small = y < -126;  // it would not be a normal number: 0
  vec kept = (vec)((~small & (ivec)y) | (small & (ivec)((vec){0} - 126)));
  vec near = kept + 0x1.8p23f, f = kept - (near - 0x1.8p23f);  // the whole number sits in the low bits of `near`
  vec p = (vec){0} + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f, p = p * f + 9.6181291e-3f, p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f, p = p * f + 6.9314718e-1f, p = p * f + 1;
  p *= (vec)(((ivec)near + 127) << 23);
  ivec none = x != x;  // what is no number stays none
  return (vec)((none & (ivec)x) | (~none & ~small & (ivec)p));
}

// score = softmax of scale x score + bias, over the last of (B H, N, K); kept = score after dropout.
static void softmax_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *x) {
  int64_t K = c->K;
  for (int64_t n = first; n < last; n++) {
    int64_t at = (g * c->N + n) * K;
    for (int64_t r = 0; r < K; r++) x[r] = c->score[at + r] * c->scale + (c->bias ? c->bias[n * K + r] : 0);
    if (c->first) x[0] = *c->first;
    float top = x[0], total = 0;
    for (int64_t r = 1; r < K; r++) top = x[r] > top ? x[r] : top;
    for (int64_t r = 0; r < K; r++) x[r] -= top;
    for (int64_t r = K; r < whole(K); r++) x[r] = 0;
    for (int64_t r = 0; r < K; r += W) store(x + r, exponential(load(x + r)));
    for (int64_t r = 0; r < K; r++) total += x[r];
    for (int64_t r = 0; r < K; r++) c->score[at + r] = x[r] / total;
    for (int64_t r = 0; c->keep && r < K; r++) c->kept[at + r] = c->score[at + r] * c->keep[at + r];
  }
}

// ---------------------------------------------------------------- a matrix for each rank

// to = weight x from, E numbers.
INLINE void scaled(float *to, const float *from, float weight, int64_t E) {
  int64_t e = 0;
  for (; e + W <= E; e += W) store(to + e, load(from + e) * weight);
  for (; e < E; e++) to[e] = from[e] * weight;
}

// out[n] = sum over r of matrix[r] (weight[n, r] values[index[n, r]]): the neighbors of R rows side by side, times the packed matrix.
static int conv_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  int64_t E = c->E, K = c->K, F = c->F;
  float *laid = scratch, *s = laid + R * K * E;
  const float *values = group(c->values, c, g), *at[R];
  for (int64_t n = first; n < last; n += R) {
    for (int64_t r = 0; r < R; r++) {
      int64_t m = least(n + r, last - 1);
      const int64_t *index = list_of(c, g, m);
      if (outside(index, K, c->M)) return 1;
      at[r] = laid + r * K * E;
      for (int64_t k = 0; k < K; k++) scaled(laid + (r * K + k) * E, values + index[k] * c->values.row, c->weight[(g * c->N + m) * K + k], E);
    }
    scores(s, c->panel, at, F, K * E);
    for (int64_t r = 0; r < R && n + r < last; r++)
      __builtin_memcpy(group(c->out, c, g) + (n + r) * c->out.row, s + r * whole(F), F * sizeof(float));
  }
  return 0;
}

// Of a whole group: score[n, r] = the gradient of weight[n, r], and that of the values.
static int conv_gradient(const Call *c, int64_t g, float *s) {
  int64_t E = c->E, K = c->K, ld = whole(K * E);
  const float *values = group(c->values, c, g), *at[R];
  float *d_values = group(c->d_values, c, g);
  for (int64_t n = 0; n < c->N; n += R) {
    for (int64_t r = 0; r < R; r++) at[r] = group(c->grad, c, g) + least(n + r, c->N - 1) * c->grad.row;
    scores(s, c->panel, at, K * E, c->F);  // the gradients of R rows' neighbors side by side
    for (int64_t r = 0; r < R && n + r < c->N; r++) {
      const int64_t *index = list_of(c, g, n + r), list = (g * c->N + n + r) * K;
      if (outside(index, K, c->M)) return 1;
      for (int64_t k = 0; k < K; k++) {
        const float *x = s + r * ld + k * E, *from = values + index[k] * c->values.row;
        float *to = d_values + index[k] * c->d_values.row, weight = c->kept[list + k], rest = 0;
        vec total = {0};
        int64_t e = 0;
        for (; e + W <= E; e += W) {
          total += load(x + e) * load(from + e);
          store(to + e, load(to + e) + weight * load(x + e));
        }
        for (; e < E; e++) rest += x[e] * from[e], to[e] += weight * x[e];
        c->score[list + k] = sum(total) + rest;
      }
    }
  }
  return 0;
}

// d_matrix[f, j] = sum over all rows n of all groups of grad[n, f] (weight values)[n, j], for channels j of laid-out neighbors from first
// to last: C vectors of them at a time, over all groups in their order.
static int matrix_gradient(const Call *c, int64_t none, int64_t first, int64_t last, float *scratch) {
  (void)none;
  int64_t N = c->N, E = c->E, K = c->K, F = c->F;
  for (int64_t j = first; j < last; j += C * W) {
    int64_t width = least(C * W, last - j);
    float *total = scratch, *panel = total + F * width, *s = panel + N * width;
    for (int64_t i = 0; i < F * width; i++) total[i] = 0;
    for (int64_t g = 0; g < c->B * c->H; g++) {
      const float *values = group(c->values, c, g), *at[R];
      for (int64_t n = 0; n < N; n++) {
        const int64_t *index = list_of(c, g, n);
        const float *weight = c->kept + (g * N + n) * K;
        for (int64_t i = 0, step; i < width; i += step) {  // up to the end of a neighbor's channels; zeros after the last one's
          int64_t k = (j + i) / E, e = (j + i) % E;
          step = least(k < K ? E - e : width, width - i);
          if (k < K) scaled(panel + n * width + i, values + index[k] * c->values.row + e, weight[k], step);
          else for (int64_t l = 0; l < step; l++) panel[n * width + i + l] = 0;
        }
      }
      for (int64_t f = 0; f < F; f += R) {
        for (int64_t r = 0; r < R; r++) at[r] = c->turned + (g * F + least(f + r, F - 1)) * N;
        scores(s, panel, at, width, N);
        for (int64_t i = 0; i < least(R, F - f) * width; i++) total[f * width + i] += s[i];
      }
    }
    for (int64_t f = 0; f < F; f++)
      for (int64_t i = 0; i < least(width, K * E - j); i++) c->d_matrix[f * K * E + j + i] = total[f * width + i];
  }
  return 0;
}

// ---------------------------------------------------------------- attention over lists: scores, softmax and sum of a row in one go

// The K nearest columns (or the given list), softmax of their scores, and out = the sum of `values` with these weights.
static int attend_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  Call dots = *c, sums = *c;
  dots.factor = NULL;  // it belongs to the sums
  if (c->chosen) {
    nearest_rows(c, g, first, last, scratch);
    sums.index = c->chosen, sums.lists = c->N * c->K;
  } else if (dot_rows(&dots, g, first, last, scratch)) {
    return 1;
  }
  softmax_rows(c, g, first, last, scratch);
  sums.columns = c->values, sums.D = c->E, sums.weight = c->keep ? c->kept : c->score;
  return c->matrix ? conv_rows(&sums, g, first, last, scratch) : bag_rows(&sums, g, first, last, scratch);
}

// score = the gradient of the products rows . columns, from `weight` and the gradient of the sums; d_rows from it.
static int attend_gradient_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  Call dots = *c, sums = *c;
  dots.rows = c->grad, dots.columns = c->values, dots.D = c->E;
  if (c->matrix ? conv_gradient(c, g, scratch) : dot_rows(&dots, g, first, last, scratch)) return 1;
  for (int64_t n = first; n < last; n++) {
    const float *w = c->weight + (g * c->N + n) * c->K, *keep = c->keep ? c->keep + (g * c->N + n) * c->K : NULL;
    float *grad = c->score + (g * c->N + n) * c->K, mean = 0;
    for (int64_t r = 0; keep && r < c->K; r++) grad[r] *= keep[r];
    for (int64_t r = 0; r < c->K; r++) mean += w[r] * grad[r];
    for (int64_t r = 0; r < c->K; r++) grad[r] = c->scale * w[r] * (grad[r] - mean);
    if (c->first) grad[0] = 0;
  }
  sums.out = c->d_rows, sums.weight = c->score, sums.factor = NULL;
  return bag_rows(&sums, g, first, last, scratch);
}

// ---------------------------------------------------------------- what Python calls: 0, or how many pieces of work failed

static float *packed(const float *matrix, int64_t rows, int64_t width) {
  float *panel = malloc(whole(rows) * width * sizeof(float));
  if (panel) pack(panel, matrix, width, rows, width);
  return panel;
}
static int64_t room(const Call *c) {  // that selecting takes
  int64_t ld = whole(c->M);
  return ld * (c->D + R + 5) + whole(c->K) + 128;
}
int64_t neighbors_nearest(const Call *c) { return shared(nearest_rows, c, c->N, R, room(c)); }
int64_t neighbors_scan(const Call *c) { return shared(scan_rows, c, c->N, R, CHUNK * (c->D + R + 1)); }
int64_t neighbors_bag(const Call *c) { return shared(bag_rows, c, c->N, 1, 0); }
int64_t neighbors_pair_dot(const Call *c) { return shared(dot_rows, c, c->N, 1, 0); }
int64_t neighbors_spread(const Call *c) { return shared(spread_channels, c, c->D, W, 0); }
int64_t neighbors_factor_gradient(const Call *c) { return shared(factor_channels, c, c->D, W, 0); }
int64_t neighbors_attend(const Call *c) {
  Call with = *c;
  int64_t selecting = c->chosen ? room(c) : whole(c->K), laid = R * (c->K * c->E + whole(c->F));
  if (c->matrix && !(with.panel = packed(c->matrix, c->F, c->K * c->E))) return 1;
  int64_t wrong = shared(attend_rows, &with, c->N, R, c->matrix && laid > selecting ? laid : selecting);
  if (c->matrix) free(with.panel);
  return wrong;
}
int64_t neighbors_attend_gradient(const Call *c) {
  Call keys = *c, values = *c, with = *c;
  keys.out = c->d_columns, keys.weight = c->score, keys.factor = NULL;
  if (!c->matrix) {
    values.rows = c->grad, values.out = c->d_values, values.D = c->E, values.weight = c->kept;
    return shared(attend_gradient_rows, c, c->N, 1, 0) + shared(spread_channels, &keys, c->D, W, 0) +
           shared(spread_channels, &values, c->E, W, 0);
  }
  int64_t width = whole(c->K * c->E);
  if (!(with.panel = packed(c->matrix, c->K * c->E, c->F))) return 1;
  int64_t wrong = shared(attend_gradient_rows, &with, c->N, c->N, R * width) + shared(spread_channels, &keys, c->D, W, 0);
  free(with.panel);
  return wrong ? wrong : shared_by(matrix_gradient, c, 1, 1, width, C * W, (c->F + c->N + R) * C * W);
}
