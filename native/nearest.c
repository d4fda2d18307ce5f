// Lists of neighbors on a CPU: which K columns have the largest dot products with a row, and sums over such lists.
//
// A group is one head of one image: N rows (queries), M columns (keys, values), D channels, float32. Scores are made a few rows at a time
// in registers and selected from while they are in the cache; no N x M and no N x K x D numbers are ever stored.
// Vectors are those of GCC and Clang, for any processor. Python checks that memory is of the right sizes (native/__init__.py).
#include "vectors.h"

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

// Columns outside of a row's list, by their places among all that are: the u-th of them comes after as many of the list as have at most u
// others before them. own holds places (H, N, F), the same for all images; chosen is (B H, N, F).
static int other_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  int64_t K = c->K, F = c->F, *before = (int64_t *)(((uintptr_t)scratch + 7) & ~(uintptr_t)7);
  for (int64_t n = first; n < last; n++) {
    const int64_t *index = list_of(c, g, n), *place = c->own + (g % c->H * c->N + n) * F;
    int64_t *to = c->chosen + (g * c->N + n) * F;
    for (int64_t r = 0, p; r < K; r++) {  // sorted
      for (p = r; p && before[p - 1] > index[r]; p--) before[p] = before[p - 1];
      before[p] = index[r];
    }
    for (int64_t r = 0; r < K; r++) before[r] -= r;
    for (int64_t i = 0; i < F; i++) {
      int64_t count = 0;
      for (int64_t r = 0; r < K; r++) count += before[r] <= place[i];
      to[i] = place[i] + count;
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

#include "matrix.h"

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
int64_t neighbors_others(const Call *c) { return shared(other_rows, c, c->N, 1, 2 * c->K + 2); }
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
