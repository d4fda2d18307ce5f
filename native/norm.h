// Normalization of each row by its own channels: z = (x - mean) / deviation, y = z weight + bias (a LayerNorm); with nothing taken away where
// it is not `centered` (an RMSNorm). Queries and keys lie scattered over a projection, head by head: they are read where they are.

enum { WIDEST = 1024 };  // channels of a row at most: it stays in registers, or on the stack

typedef struct {
  View x, grad;               // (B, H, N, D)
  float *y, *d_x;             // (B, H, N, D), one after the other
  const float *weight, *bias; // (D), or none: 1, and 0
  float *d_weight, *d_bias;   // (B H, D): one sum for each group, to be added up in their order; or none
  int64_t B, H, N, D, centered, threads;
  float epsilon;
} Norm;

// A row is `vectors` vectors and `rest` channels in one more, whose other lanes are 0. Where both are known when this is compiled, all of it
// stays in registers.
INLINE vec piece(const float *x, int v, int vectors, int rest) {
  if (v < vectors) return load(x + v * W);
  vec y = {0};
  for (int l = 0; l < rest; l++) y[l] = x[v * W + l];
  return y;
}
INLINE void put(float *y, int v, int vectors, int rest, vec x) {
  if (v < vectors) store(y + v * W, x);
  else for (int l = 0; l < rest; l++) y[v * W + l] = x[l];
}

// z of a row x, and what x - mean was multiplied by.
INLINE float normal(int vectors, int rest, const Norm *c, const float *x, vec *z) {
  int count = vectors + (rest > 0), D = vectors * W + rest;
  vec total = {0};
  for (int v = 0; v < count; v++) z[v] = piece(x, v, vectors, rest);
  if (c->centered) {
    for (int v = 0; v < count; v++) total += z[v];
    float mean = sum(total) / D;
    for (int v = 0; v < count; v++) z[v] -= mean;
    if (rest) z[vectors] = (vec)((ivec)z[vectors] & (lanes() < rest));
    total = (vec){0};
  }
  for (int v = 0; v < count; v++) total += z[v] * z[v];
  float scale = 1 / __builtin_sqrtf(sum(total) / D + c->epsilon);
  for (int v = 0; v < count; v++) z[v] *= scale;
  return scale;
}

INLINE const float *row_of(const Norm *c, View x, int64_t g, int64_t n) { return x.data + g / c->H * x.image + g % c->H * x.head + n * x.row; }

INLINE void normal_group(int vectors, int rest, const Norm *c, int64_t g) {
  int count = vectors + (rest > 0);
  vec z[WIDEST / W], weight[WIDEST / W], bias[WIDEST / W];
  for (int v = 0; v < count; v++) {
    weight[v] = c->weight ? piece(c->weight, v, vectors, rest) : (vec){0} + 1;
    bias[v] = c->bias ? piece(c->bias, v, vectors, rest) : (vec){0};
  }
  for (int64_t n = 0; n < c->N; n++) {
    float *y = c->y + (g * c->N + n) * c->D;
    normal(vectors, rest, c, row_of(c, c->x, g, n), z);
    for (int v = 0; v < count; v++) put(y, v, vectors, rest, z[v] * weight[v] + bias[v]);
  }
}

// With h = the gradient times the weight: d_x = scale (h - mean of h - z times the mean of h z).
INLINE void gradient_group(int vectors, int rest, const Norm *c, int64_t g) {
  int count = vectors + (rest > 0), D = vectors * W + rest;
  vec z[WIDEST / W], h[WIDEST / W], weight[WIDEST / W], d_weight[WIDEST / W], d_bias[WIDEST / W];
  for (int v = 0; v < count; v++) {
    weight[v] = c->weight ? piece(c->weight, v, vectors, rest) : (vec){0} + 1;
    d_weight[v] = d_bias[v] = (vec){0};
  }
  for (int64_t n = 0; n < c->N; n++) {
    const float *grad = row_of(c, c->grad, g, n);
    float *d_x = c->d_x + (g * c->N + n) * c->D, scale = normal(vectors, rest, c, row_of(c, c->x, g, n), z);
    vec all = {0}, along = {0};
    for (int v = 0; v < count; v++) {
      vec of_y = piece(grad, v, vectors, rest);
      d_weight[v] += of_y * z[v], d_bias[v] += of_y;
      h[v] = of_y * weight[v];
      all += h[v], along += h[v] * z[v];
    }
    float mean = c->centered ? sum(all) / D : 0, mean_along = sum(along) / D;
    for (int v = 0; v < count; v++) put(d_x, v, vectors, rest, scale * (h[v] - mean - z[v] * mean_along));
  }
  for (int v = 0; v < count; v++) {
    if (c->d_weight) put(c->d_weight + g * c->D, v, vectors, rest, d_weight[v]);
    if (c->d_bias) put(c->d_bias + g * c->D, v, vectors, rest, d_bias[v]);
  }
}

// Heads of 64 and of 32 channels, which are most, each compiled for itself; and all others.
#define FOR_EACH_GROUP(work)                                                    \
  int vectors = (int)c->D / W, rest = (int)c->D % W;                            \
  _Pragma("omp parallel for num_threads(c->threads) if (c->threads > 1)")       \
  for (int64_t g = 0; g < c->B * c->H; g++) {                                   \
    if (c->D == 64) work(64 / W, 0, c, g);                                      \
    else if (c->D == 32) work(32 / W, 0, c, g);                                 \
    else work(vectors, rest, c, g);                                             \
  }
void neighbors_normalized(const Norm *c) { FOR_EACH_GROUP(normal_group) }
void neighbors_normalized_gradient(const Norm *c) { FOR_EACH_GROUP(gradient_group) }
