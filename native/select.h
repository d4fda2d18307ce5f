// Which columns: the K best of a row, the K best of very many columns, and columns that are in no list.

// ---------------------------------------------------------------- the K best of a row

// The bits of floats to whole numbers of the same order; the same exclusive or leads back. Numbers that are none, of either sign, come out above
// infinity, all below the largest whole number, so that 1 can be added.
INLINE ivec ordered(ivec bits) {
  ivec none = (bits & 0x7FFFFFFF) > 0x7F800000;
  return (none & (INT32_MAX - 1)) | (~none & (bits ^ (bits >> 31 & 0x7FFFFFFF)));
}

// Room for a short list, in whole vectors and in eights. Lists are compared by eights: for 16 numbers, processors have comparisons to a mask,
// from which a compiler has to make numbers again; two of 8 numbers take less.
INLINE int64_t of_lists(int64_t n) { return (whole(n) + 7) / 8 * 8; }

// A key that at least K of the columns reach, and few others. Columns are dealt to of_lists(K) lanes; the K-th largest of the lanes' maxima
// is reached by K lanes at least. `lane` has room for that many keys.
static int32_t bound(const int32_t *key, int64_t ld, int64_t K, int32_t *lane) {
  int64_t count = of_lists(K);
  for (int64_t l = 0; l < count; l += W) {
    ivec top = keys_at(key + l);
    for (int64_t j = l + count; j < ld; j += count) top = larger(top, keys_at(key + j));
    *(ivec_at *)(lane + l) = top;
  }
  eight reached = (eight){0} + INT32_MIN;
  for (int64_t l = 0; l < count; l += 8) {
    eight x = *(const eight *)(lane + l), smaller = {0};
    for (int64_t j = 0; j < count; j++) smaller -= x > lane[j];  // true is -1
    eight too_many = smaller > (int32_t)(count - K);
    reached = larger_of_eight(reached, (~too_many & x) | (too_many & INT32_MIN));
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

// Columns whose key is at least `least_key`, in their order, filled up to of_lists(count) with `ld`, where no column is; how many columns.
// No branch hangs on a key, not even on whether any of 32 is large enough: one in six would be guessed wrong, which takes longer than a list
// of none.
static int64_t reaching(const int32_t *key, int64_t ld, int32_t least_key, int32_t *column) {
  int64_t count = 0;
  for (int64_t j = 0; j < ld; j += 32) {
    eight found = {0}, bit = {1, 2, 4, 8, 16, 32, 64, 128};  // a bit for each of 32 columns; from ld on, no key is large enough
    for (int i = 0; i < 32; i += 8) found |= ~(least_key > *(const eight *)(key + j + i)) & bit << i;
    uint32_t bits = any_bit_of_eight(found);
    for (int i = 0; i < 4; i++) {
      uint32_t byte = bits >> 8 * i & 255;
      *(eight *)(column + count) = *(const eight *)places[byte] + (int32_t)(j + 8 * i);
      count += __builtin_popcount(byte);
    }
  }
  for (int64_t i = 0; i < of_lists(1); i += 8) *(eight *)(column + count + i) = (eight){0} + (int32_t)ld;
  return count;
}

INLINE int64_t few(int64_t K) { return 2 * K + 4 * W; }  // columns of which each is compared with each; more only where many are equal

// Keys of `count` columns side by side, if they are few.
static void collect(const int32_t *key, const int32_t *column, int64_t count, int64_t K, int32_t *x) {
  for (int64_t i = 0; i < of_lists(count) && count <= few(K); i++) x[i] = key[column[i]];
}

// The K best of `count` columns, best first and equals in their order: `best` and its keys. `x` has what was collected.
static void rank(const int32_t *key, const int32_t *column, int64_t count, int64_t K, const int32_t *x, int32_t *best, int32_t *best_key) {
  if (count > few(K)) {  // into a short list, one after the other
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
  int64_t all = of_lists(count);
  eight me = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t i = 0; i < all; i += 8) {  // the place of each: how many are larger, or equal and before it. True is -1
    eight y = *(const eight *)(x + i), place = (eight){0} + (int32_t)i;
    for (int64_t j = 0; j < i; j++) place += y > x[j];
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) place -= x[i + j] - (j < me) > y;  // an equal one that is before is larger by 1
    for (int64_t j = i + 8; j < all; j++) place -= x[j] > y;
    for (int64_t l = 0; l < 8; l++) best[place[l]] = column[i + l], best_key[place[l]] = x[i + l];
  }
}

// Columns outside of a list, by their places among all that are: the u-th of them comes after as many of the list as have at most u others
// before them. `before` has room for whole(K) numbers.
static void others(const int64_t *list, int64_t K, const int64_t *place, int64_t S, int32_t *restrict before, int64_t *restrict to) {
  for (int64_t r = 0; r < K; r += W) {
    ivec column = (ivec){0} + INT32_MAX;  // beyond the list: after all others
    for (int64_t l = 0; l < least(W, K - r); l++) column[l] = (int32_t)list[r + l];
    ivec others_before = column;
    for (int64_t i = 0; i < K; i++) others_before += (int32_t)list[i] < column;  // true is -1
    *(ivec_at *)(before + r) = others_before;
  }
  for (int64_t i = 0; i < S; i += W) {
    ivec u = {0};
    for (int64_t l = 0; l < least(W, S - i); l++) u[l] = place[i + l] >> 31 ? -1 : (int32_t)place[i + l];  // what is no place is no column
    ivec column = u;
    for (int64_t r = 0; r < K; r++) column -= before[r] <= u;
    for (int64_t l = 0; l < least(W, S - i); l++) to[i + l] = column[l];
  }
}

// What row n's list has beside the nearest, with its scores: first the row itself, last S others. `s` holds its scores with all columns, or
// none where it was selected among some.
static int completed(const Call *c, int64_t g, int64_t n, const float *s, int32_t *before) {
  int64_t K = c->K - c->S, at = (g * c->N + n) * c->K, *list = c->chosen + at;
  const float *row = group(c->rows, c, g) + n * c->rows.row, *columns = group(c->columns, c, g);
  if (c->among) list[0] = n;
  if (c->S) others(list, K, c->places + (g % c->H * c->N + n) * c->S, c->S, before, list + K);
  if (outside(list, c->K, c->M)) return 1;
  if (c->among && !c->first) c->score[at] = dot(row, NULL, columns + n * c->columns.row, c->D);
  for (int64_t r = K; r < c->K; r++) c->score[at + r] = s ? s[list[r]] : dot(row, NULL, columns + list[r] * c->columns.row, c->D);
  return 0;
}

// Scores and columns of each row's K nearest, and what else the list has. Each step is taken for R rows before the next one is: while one row
// waits for what it has just computed, the processor is at work on others.
static int nearest_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  int64_t M = c->among ? c->A : c->M, itself = c->among != NULL, D = c->D, K = c->K - itself - c->S, ld = whole(M), wide = ld + 32;
  int64_t most = of_lists(few(K));
  float *panel = scratch, *s = panel + ld * D;
  int32_t *key = (int32_t *)(s + R * ld), *column = key + R * wide, *x = column + R * wide, *best = x + R * most, *best_key = best + R * most;
  int32_t *lane = best_key + R * most, *before = lane + of_lists(K), least_key[R];
  int64_t count[R];
  const float *rows = group(c->rows, c, g), *at[R];
  pack(panel, group(c->columns, c, g), c->columns.row, c->among, M, D);
  for (int64_t n = first; n < last; n += R) {
    int64_t here = least(R, last - n);
    for (int r = 0; r < R; r++) at[r] = rows + least(n + r, last - 1) * c->rows.row;
    scores(s, panel, at, M, D);
    for (int64_t r = 0; r < here; r++) {
      int32_t *to = key + r * wide;
      for (int64_t j = 0; j < ld; j += W) *(ivec_at *)(to + j) = ordered((ivec)load(s + r * ld + j));
      for (int64_t j = M; j < wide; j++) to[j] = INT32_MIN;  // no column; and after all that are
      if (c->own && c->own[n + r] >= 0) to[c->own[n + r]] = (int32_t)0xFF800000 ^ 0x7FFFFFFF;  // minus infinity
    }
    for (int64_t r = 0; r < here; r++) least_key[r] = bound(key + r * wide, ld, K, lane);
    for (int64_t r = 0; r < here; r++) count[r] = reaching(key + r * wide, ld, least_key[r], column + r * wide);
    for (int64_t r = 0; r < here; r++) collect(key + r * wide, column + r * wide, count[r], K, x + r * most);
    for (int64_t r = 0; r < here; r++) {
      rank(key + r * wide, column + r * wide, count[r], K, x + r * most, best + r * most, best_key + r * most);
    }
    for (int64_t r = 0; r < here; r++) {
      int64_t to = (g * c->N + n + r) * c->K + itself, *list = c->chosen + to;
      float *score = c->score + to;
      for (int64_t i = 0; i < K; i++) {
        int32_t bits = best_key[r * most + i];
        bits ^= bits >> 31 & 0x7FFFFFFF;
        __builtin_memcpy(score + i, &bits, 4);
        list[i] = best[r * most + i];
      }
      for (int64_t i = 0; c->among && i < K; i++) list[i] = c->among[list[i]];
      if ((c->among || c->S) && completed(c, g, n + r, c->among ? NULL : s + r * ld, before)) return 1;
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
      found |= ((more ? load(s + i) + load(more + i) : load(s + i)) > score[K - 1]) & (1 << (lanes() + (int32_t)(i - j)));
    }
    for (uint32_t bits = any_bit(found); bits; bits &= bits - 1) {
      int64_t i = j + __builtin_ctz(bits), p = K - 1;
      float x = more ? s[i] + more[i] : s[i];
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
    pack(panel, columns + b * c->columns.row, c->columns.row, NULL, count, D);
    for (int64_t j = 0; j < ld; j++) more[j] = j >= count ? -__builtin_inff() : c->factor ? c->factor[b + j] : 0;
    for (int64_t n = first; n < last; n += R) {
      for (int r = 0; r < R; r++) at[r] = rows + least(n + r, last - 1) * c->rows.row;
      scores(s, panel, at, count, D);
      for (int64_t r = 0, i = n * K; r < least(R, last - n); r++, i += K) keep(s + r * ld, more, b, ld, K, score + i, chosen + i);
    }
  }
  return 0;
}

// Scores of a row with M columns, from column b on, that are there already, in bfloat16 (the upper halves of floats), into a list of K that
// stands. `s` has room for as many numbers and keys, in whole(M), and for of_lists(K) more.
static void keep_scores(const uint16_t *halves, int64_t b, int64_t M, int64_t K, float *s, float *score, int64_t *chosen) {
  int64_t ld = whole(M);
  int32_t *key = (int32_t *)(s + ld);
  for (int64_t j = 0; j < ld; j++) {
    uint32_t bits = j < M ? (uint32_t)halves[j] << 16 : 0xFF800000, none = (bits & 0x7FFFFFFF) > 0x7F800000;
    bits = none ? 0xFF800000 : bits;  // minus infinity
    __builtin_memcpy(s + j, &bits, 4);
  }
  // An empty list would take most columns at first. It begins with a number that K of these exceed.
  if (score[0] == -__builtin_inff() && M >= 4 * of_lists(K)) {
    for (int64_t j = 0; j < ld; j += W) *(ivec_at *)(key + j) = ordered((ivec)load(s + j));
    int32_t bits = bound(key, ld, K, key + ld);
    float reached;
    bits ^= bits >> 31 & 0x7FFFFFFF;
    __builtin_memcpy(&reached, &bits, 4);
    reached -= (reached < 0 ? -reached : reached) / 64 + 1e-30f;  // NOTE: the next key would not do: 0 does not exceed -0
    for (int64_t r = 0; r < K && reached < __builtin_inff(); r++) score[r] = reached;
  }
  keep(s, NULL, b, ld, K, score, chosen);
}

static int other_rows(const Call *c, int64_t g, int64_t first, int64_t last, float *scratch) {
  for (int64_t n = first; n < last; n++)
    others(list_of(c, g, n), c->K, c->places + (g % c->H * c->N + n) * c->S, c->S, (int32_t *)scratch, c->chosen + (g * c->N + n) * c->S);
  return 0;
}
