// A convolution whose kernel is a matrix for each rank: neighbors laid side by side, times the packed matrix, and its gradients.

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

enum { BLOCK = 2 * W };  // channels of a gradient at a time: blocks of one group are work for several cores

static int64_t blocks_of(const Call *c) { return (c->E + BLOCK - 1) / BLOCK; }

// The matrix of a gradient in these blocks, packed: column k width + l of a block is its channel l of rank k, the last channel again beyond
// the end of the last block.
static float *packed_in_blocks(const Call *c) {
  int64_t E = c->E, K = c->K, F = c->F;
  float *panel = malloc(blocks_of(c) * K * BLOCK * F * sizeof(float));
  int64_t *which = malloc(K * BLOCK * sizeof(int64_t));
  for (int64_t e = 0; panel && which && e < E; e += BLOCK) {
    int64_t width = whole(least(BLOCK, E - e));
    for (int64_t j = 0; j < K * width; j++) which[j] = j / width * E + least(e + j % width, E - 1);
    pack(panel + e * K * F, c->matrix, F, which, K * width, F);
  }
  if (which) return free(which), panel;
  return free(panel), NULL;
}

// Gradients of the values' channels first to last, and what these channels add to the gradient of weight[n, r]: one sum for each block.
static int conv_gradient(const Call *c, int64_t g, int64_t first, int64_t last, float *s) {
  int64_t N = c->N, K = c->K, F = c->F;
  const float *at[R];
  for (int64_t e = first; e < last; e += BLOCK) {
    int64_t count = least(BLOCK, last - e), width = whole(count);
    const float *values = group(c->values, c, g) + e;
    float *d_values = group(c->d_values, c, g) + e, *sums = c->d_blocks + (e / BLOCK * c->B * c->H + g) * N * K;
    for (int64_t n = 0; n < N; n += R) {
      for (int64_t r = 0; r < R; r++) at[r] = group(c->grad, c, g) + least(n + r, N - 1) * c->grad.row;
      scores(s, c->panel + e * K * F, at, K * width, F);  // the gradients of these channels of R rows' neighbors side by side
      for (int64_t r = 0; r < R && n + r < N; r++) {
        const int64_t *index = list_of(c, g, n + r);
        if (outside(index, K, c->M)) return 1;
        for (int64_t k = 0; k < K; k++) {
          const float *x = s + (r * K + k) * width;
          float *to = d_values + index[k] * c->d_values.row, weight = c->kept[(g * N + n + r) * K + k];
          sums[(n + r) * K + k] = dot(x, NULL, values + index[k] * c->values.row, count);
          int64_t l = 0;
          for (; l + W <= count; l += W) store(to + l, load(to + l) + weight * load(x + l));
          for (; l < count; l++) to[l] += weight * x[l];
        }
      }
    }
  }
  return 0;
}

// score[n, r] = the gradient of weight[n, r]: what the blocks have, in their order.
static void sum_of_blocks(const Call *c, int64_t g, int64_t first, int64_t last) {
  int64_t all = c->B * c->H * c->N * c->K;
  for (int64_t i = (g * c->N + first) * c->K; i < (g * c->N + last) * c->K; i++) {
    float total = 0;
    for (int64_t b = 0; b < blocks_of(c); b++) total += c->d_blocks[b * all + i];
    c->score[i] = total;
  }
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
