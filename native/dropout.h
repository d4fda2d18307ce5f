// Dropout by rows: what place j of a row draws is a hash of the row's key and of j's number (layers/dropout.py has the same in torch's
// operators), so nothing is stored for the way back: gradients are dropped by the same call.

// out = x scale where the draw is at least `below`, x 0 elsewhere; rows of `count` numbers each.
void neighbors_dropped(float *out, const float *x, const int32_t *keys, const int32_t *numbers, int64_t rows, int64_t count, int64_t below,
                       float scale, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * count > 1 << 16)
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < count; j++) {
      uint32_t draw = ((uint32_t)keys[r] ^ (uint32_t)numbers[j]) * 0x7FEB352Du;
      draw = (draw ^ (uint32_t)((int32_t)draw >> 15)) * 0x846CA68Bu;
      out[r * count + j] = x[r * count + j] * ((int32_t)draw >= (int32_t)below ? scale : 0.0f);
    }
  }
}
