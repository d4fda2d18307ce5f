// Lists of neighbors on a CPU: which K columns have the largest dot products with a row, and sums over such lists.
//
// A group is one head of one image: N rows (queries), M columns (keys, values), D channels, float32. Scores are made a few rows at a time
// in registers and selected from while they are in the cache; no N x M and no N x K x D numbers are ever stored.
// Vectors are those of GCC and Clang, for any processor. Python checks that memory is of the right sizes (native/__init__.py).
#include "vectors.h"
#include "select.h"

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

// out[index[r]] += weight[r] factor[r] row, `vectors` vectors of channels from channel d on.
INLINE void scatter(int vectors, const Call *c, float *out, const float *row, const int64_t *index, const float *weight, int64_t d) {
  vec x[4];
  for (int v = 0; v < vectors; v++) x[v] = load(row + d + v * W);
  for (int64_t r = 0; r < c->K; r++) {
    float *to = out + index[r] * c->out.row + d;
    for (int v = 0; v < vectors; v++) {
      vec w = (vec){0} + weight[r];
      if (c->factor) w *= load(c->factor + r * c->D + d + v * W);
      store(to + v * W, load(to + v * W) + w * x[v]);
    }
  }
}

// The same for all rows n, channels first to last. `out` holds zeros before.
static int spread_channels(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  (void)scratch;
  int64_t K = c->K;
  float *out = group(c->out, c, g);
  for (int64_t n = 0; n < c->N; n++) {
    const int64_t *index = list_of(c, g, n);
    const float *weight = c->weight + (g * c->N + n) * K, *row = group(c->rows, c, g) + n * c->rows.row;
    if (outside(index, K, c->M)) return 1;
    int64_t d = first;
    for (; d + 4 * W <= last; d += 4 * W) scatter(4, c, out, row, index, weight, d);
    for (; d + W <= last; d += W) scatter(1, c, out, row, index, weight, d);
    for (; d < last; d++)
      for (int64_t r = 0; r < K; r++) out[index[r] * c->out.row + d] += weight[r] * (c->factor ? c->factor[r * c->D + d] : 1) * row[d];
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
      c->score[(g * c->N + n) * K + r] = dot(row, factor, from, D);
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
  p *= (vec)(((uvec)near + 127) << 23);
  ivec none = x != x;  // what is no number stays none
  return (vec)((none & (ivec)x) | (~none & ~small & (ivec)p));
}

// score = softmax of scale x score + bias, over the last of (B H, N, K); kept = score after dropout. R rows at a time, in `x`.
static void softmax_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *x) {
  int64_t K = c->K, width = whole(K);
  for (int64_t i = 0; i < R * width; i++) x[i] = -__builtin_inff();  // beyond K: e to the minus infinity, 0
  for (int64_t n = first; n < last; n += R) {
    int64_t here = least(R, last - n), at = (g * c->N + n) * K;
    for (int64_t r = 0; r < here; r++) {
      for (int64_t i = 0; i < K; i++) x[r * width + i] = c->score[at + r * K + i] * c->scale + (c->bias ? c->bias[(n + r) * K + i] : 0);
      if (c->first) x[r * width] = *c->first;
    }
    for (int64_t r = 0; r < here; r++) {
      float *row = x + r * width;
      vec top = load(row), total = {0};
      for (int64_t i = W; i < width; i += W) top = greater(top, load(row + i));
      float most = greatest(top);
      for (int64_t i = 0; i < width; i += W) {
        vec e = exponential(load(row + i) - most);
        total += e;
        store(row + i, e);
      }
      float all = sum(total);
      for (int64_t i = 0; i < width; i += W) store(row + i, load(row + i) / all);
    }
    for (int64_t r = 0; r < here; r++) {
      for (int64_t i = 0; i < K; i++) c->score[at + r * K + i] = x[r * width + i];
      for (int64_t i = K; i < width; i++) x[r * width + i] = -__builtin_inff();
    }
    for (int64_t i = at; c->keep && i < at + here * K; i++) c->kept[i] = c->score[i] * c->keep[i];
  }
}

#include "matrix.h"
#include "dropout.h"
#include "norm.h"
#include "distance.h"

// ---------------------------------------------------------------- attention over lists: scores, softmax and sum of a row in one go

// The K nearest columns (or the given list), softmax of their scores, and out = the sum of `values` with these weights.
static int attend_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  Call dots = *c, sums = *c;
  dots.factor = NULL;  // it belongs to the sums
  if (c->chosen) {
    if (nearest_rows(c, g, first, last, scratch)) return 1;
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
  if (c->matrix) sum_of_blocks(c, g, first, last);
  else if (dot_rows(&dots, g, first, last, scratch)) return 1;
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
  if (panel) pack(panel, matrix, width, NULL, rows, width);
  return panel;
}
static int64_t room(const Call *c) {  // that selecting takes
  int64_t ld = whole(c->among ? c->A : c->M);
  return ld * (c->D + R) + 2 * R * (ld + 32) + 3 * R * of_lists(few(c->K)) + 2 * of_lists(c->K);
}
int64_t neighbors_nearest(const Call *c) { return shared(nearest_rows, c, c->N, R, room(c)); }
int64_t neighbors_scan(const Call *c) { return shared(scan_rows, c, c->N, R, CHUNK * (c->D + R + 1)); }
// Into lists of K that stand, of N rows: scores with M more columns, from column b on (see keep_scores). 0 where there is no memory.
int64_t neighbors_keep(const uint16_t *halves, float *score, int64_t *chosen, int64_t N, int64_t M, int64_t b, int64_t K, int64_t threads) {
  int64_t room = 2 * whole(M) + of_lists(K);
  float *s = malloc(threads * room * sizeof(float));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < (s ? threads : 0); t++)
    for (int64_t n = N * t / threads; n < N * (t + 1) / threads; n++)
      keep_scores(halves + n * M, b, M, K, s + t * room, score + n * K, chosen + n * K);
  free(s);
  return s != NULL;
}
int64_t neighbors_others(const Call *c) { return shared(other_rows, c, c->N, 1, whole(c->K)); }
int64_t neighbors_bag(const Call *c) { return shared(bag_rows, c, c->N, 1, 0); }
int64_t neighbors_pair_dot(const Call *c) { return shared(dot_rows, c, c->N, 1, 0); }
int64_t neighbors_spread(const Call *c) { return shared(spread_channels, c, c->D, W, 0); }
int64_t neighbors_factor_gradient(const Call *c) { return shared(factor_channels, c, c->D, W, 0); }
// Where each row is among the columns that are selected from; -1 where it is not.
static int64_t *own_places(const Call *c) {
  int64_t *own = malloc(c->N * sizeof(int64_t));
  for (int64_t n = 0; own && n < c->N; n++) own[n] = -1;
  for (int64_t i = 0; own && i < c->A; i++)
    if (c->among[i] < c->N) own[c->among[i]] = i;
  return own;
}
int64_t neighbors_attend(const Call *c) {
  Call with = *c;
  float *panel = NULL;
  int64_t *own = NULL, wrong = 1, laid = c->matrix ? R * (c->K * c->E + whole(c->F)) : R * whole(c->K), selecting = c->chosen ? room(c) : 0;
  if (c->among && (outside(c->among, c->A, c->M) || !(own = own_places(c)))) return 1;
  if (!c->matrix || (panel = packed(c->matrix, c->F, c->K * c->E))) {
    with.panel = panel, with.own = own;
    wrong = shared(attend_rows, &with, c->N, R, laid > selecting ? laid : selecting);
  }
  free(own), free(panel);
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
  int64_t width = whole(c->K * c->E), wrong = 1;
  with.panel = packed_in_blocks(c), with.d_blocks = malloc(blocks_of(c) * c->B * c->H * c->N * c->K * sizeof(float));
  if (with.panel && with.d_blocks && !(wrong = shared(conv_gradient, &with, c->E, BLOCK, R * c->K * BLOCK))) {
    wrong = shared(attend_gradient_rows, &with, c->N, 1, 0) + shared(spread_channels, &keys, c->D, W, 0) +
            shared_by(matrix_gradient, c, 1, width, C * W, (c->F + c->N + R) * C * W);
  }
  free(with.panel), free(with.d_blocks);
  return wrong;
}
